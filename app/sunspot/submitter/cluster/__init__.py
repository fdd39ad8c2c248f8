"""The Kubernetes API, what it says of a run, and that as one state."""
