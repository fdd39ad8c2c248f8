"""The subcommands of `sunspot checkpoints`, with one module each."""
