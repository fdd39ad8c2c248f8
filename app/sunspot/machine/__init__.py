"""Helpers for the local machine: memory limits, shared memory, private folders, signals and HTTP servers."""
