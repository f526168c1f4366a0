"""From a run or model folder to classes, maps and files: predictions, model folders, export."""
