"""The machine of this process: memory limits, shared memory, private folders, signals and local HTTP servers."""
