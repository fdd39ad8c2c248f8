"""Verbs of `sunspot`, one module for each.

`cli.py` imports a verb's module when the verb is used, calls its `add_arguments(parser)` and then its `run(args)`.
`arguments.py` has the arguments that several verbs share.
"""
