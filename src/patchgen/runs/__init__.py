"""Run folders: what is in them, how they are found, and the one reader of their records."""
