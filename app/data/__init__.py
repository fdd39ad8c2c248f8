"""Where rows come from, in which order they are visited, and how they reach a worker."""
