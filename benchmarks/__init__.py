"""Benchmarks of the package: `python -m benchmarks` in the folder above lists them. Not part of the wheel."""
