"""`sunspot checkpoints`: its verbs, a module each."""
