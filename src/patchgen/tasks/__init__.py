"""Tasks: what is trained on and what is scored. ``mdg`` leaves one domain out."""
