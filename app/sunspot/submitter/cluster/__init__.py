"""The Kubernetes API, what it says of a run, and what is done to one: start, follow, stop, delete."""
