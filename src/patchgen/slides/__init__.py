"""Whole slides: find tissue, cut it into tiles at one resolution, predict each tile, write maps and shapes."""
