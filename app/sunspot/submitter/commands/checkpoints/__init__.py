"""`sunspot checkpoints`: one module for each of its verbs."""
