"""The subcommands of `sunspot`, with one module each.

`cli.py` imports a subcommand's module only when it is used, and calls its `add_arguments(parser)` and `run(args)`.
`arguments.py` contains the shared arguments.
"""
