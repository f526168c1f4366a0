"""A package, because torchstain installs one of the same name, which child processes of a test would find instead."""
