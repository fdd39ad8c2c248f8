"""Files for `sunspot init`: a module, its settings and, for some kinds of tasks, sample rows."""
