"""What `sunspot init` writes: for each kind a task, its settings, and rows to begin with where none are bundled."""
