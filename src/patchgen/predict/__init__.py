"""Use a run or model folder: predictions, maps, model folders and export."""
