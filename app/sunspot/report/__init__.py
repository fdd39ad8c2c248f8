"""Renders the report of a run or a search as one HTML file, from storage alone.

`model.read_report` reads the run and returns a `Report`. `page.render` renders the report as a page with a header and
six sections, from the modules learning, predictions, speed, incidents, checkpoints and settings. A section consists of
elements and tables (html.py) and SVG charts (charts.py) of the metric history (history.py). `search.py` renders the
page of a search. `summary.py` prints the outcome of a run in the terminal.
"""

from sunspot.report.model import Report, read_report
from sunspot.report.page import render

__all__ = ["FILE", "Report", "read_report", "render"]

FILE = "report.html"
"""Name of the report file that a run's driver writes at the end."""
