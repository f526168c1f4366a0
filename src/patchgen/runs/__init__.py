"""Run folders: their content, how to find them, and the reader of their records."""
