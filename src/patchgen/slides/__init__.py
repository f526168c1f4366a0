"""Whole slides: where the tissue is, its tiles at one resolution, what a model says of each, as maps and shapes."""
