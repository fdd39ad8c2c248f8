"""The report of a run or a search as one HTML file, made from storage alone."""

from sunspot.report.model import Report, read_report
from sunspot.report.page import render

__all__ = ["FILE", "Report", "read_report", "render"]

FILE = "report.html"
"""Where a run keeps the report its driver made at its end."""
