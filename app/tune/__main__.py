"""`python -m app.tune`: train a run for each of several settings, and keep the best one's checkpoint."""

from __future__ import annotations

from app.errors import run_and_exit
from app.tune.search import main

if __name__ == "__main__":
    run_and_exit(main, "interrupted: what the trials committed is safe; the same command goes on from there")
