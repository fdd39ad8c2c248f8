"""Files that `sunspot init` writes: a module, its settings and, for some kinds of tasks, sample rows."""
