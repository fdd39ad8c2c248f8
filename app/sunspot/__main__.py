"""Runs the command `sunspot` as `python -m sunspot`."""

from sunspot.cli import main

main()
