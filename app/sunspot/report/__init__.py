"""The report of a run or a search as one HTML file, made from storage alone.

`model.read_report` reads the run and returns a `Report`. `page.render` makes the page of it: a header, and a section
from each of the modules learning, predictions, speed, incidents, checkpoints and settings. A section consists of
elements and tables (html.py) and of charts in SVG (charts.py), which draw the metric history (history.py). `search.py`
makes the page of a search in the same way. `summary.py` prints the outcome of a run in the terminal.
"""

from sunspot.report.model import Report, read_report
from sunspot.report.page import render

__all__ = ["FILE", "Report", "read_report", "render"]

FILE = "report.html"
"""Name of the file in which a run's driver writes its report at the end."""
