"""A search over settings: each trial is a run of its own, and the best becomes the search's result."""
