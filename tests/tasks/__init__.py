"""Small tasks for tests, some with faults to order."""
