"""Rows: where they come from, the order in which they are visited, and how they reach a worker."""
