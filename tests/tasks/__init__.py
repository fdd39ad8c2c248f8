"""Small tasks for tests. Some have faults on request."""
