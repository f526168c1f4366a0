"""Shared helpers: atomic files, messages, progress bars and plug-ins."""
