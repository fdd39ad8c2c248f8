"""The report of a run: one HTML file with everything that storage has to say of it. Knows nothing of torch or Ray."""

from __future__ import annotations

from app.report.gather import Report, gather
from app.report.page import render

__all__ = ["FILE", "Report", "gather", "render"]

FILE = "report.html"
"""Where the run keeps the report that its driver has made at its end."""
