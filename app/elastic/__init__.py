"""Nodes that come and go: preemption notices, restarts, hung ranks, and a receipt of what each of these cost."""
