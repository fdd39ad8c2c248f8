"""What the task shows of its trained model: texts, tables and images."""

from sunspot.report.html import Html, element, join, paragraph, picture, result, table
from sunspot.report.model import Report
from sunspot.run.shown import Exhibit


def show(report: Report) -> Html:
    """Return the parts, in the task's order; empty when it shows nothing."""
    found = report.shown
    if not found:
        return Html("")
    gone_on = report.checkpoint and found.checkpoint != report.checkpoint.name
    older = [paragraph("The task has shown this of ", element("code", found.checkpoint), ".")] if gone_on else []
    return join([*older, *(_part(part) for part in found.parts)])


def _part(part: Exhibit) -> Html:
    if part.images:
        titles = [f"{part.title}: image {number}" for number in range(1, len(part.images) + 1)]
        items = join(element("li", picture(*image)) for image in zip(part.images, titles, strict=True))
        return join([element("h3", part.title), element("ul", items, class_="examples")])
    if not part.columns:
        return join([element("h3", part.title), element("pre", part.text)])
    # A damaged file may have rows of any length.
    rows = [row for row in part.rows if len(row) == len(part.columns)]
    cells = [[result(name, cell) for name, cell in zip(part.columns, row, strict=True)] for row in rows]
    return table(part.title, part.columns, cells)
