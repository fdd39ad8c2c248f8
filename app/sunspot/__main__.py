"""Runs the `sunspot` command as `python -m sunspot`."""

from sunspot.cli import main

main()
