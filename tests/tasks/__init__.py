"""TODO tests.tasks."""
