"""A search over settings: each trial is a run of its own, and the best one's checkpoint becomes the search's."""
