"""Tables from run folders; nothing here imports the trainer."""
