"""The verbs of `sunspot`, a module each."""
