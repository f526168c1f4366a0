"""Faults on purpose: processes killed, disks filled, files damaged, and bad input by the thousand."""
