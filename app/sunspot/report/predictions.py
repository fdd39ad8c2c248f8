"""Renders the section with the predictions for held-out rows, and with the results of the task's `show` function."""

import heapq
from collections.abc import Iterator, Sequence

from sunspot.formatting import plural
from sunspot.report.html import (
    Html,
    element,
    integer,
    join,
    paragraph,
    percent,
    picture,
    result,
    scrolled,
    table,
    titled,
)
from sunspot.report.model import Report
from sunspot.run.predictions import MAX_IMAGES, MAX_PARTS, Example, Exhibit, Predictions
from sunspot.run.size_limits import cut
from sunspot.settings import PREFIX

MAX_CLASSES = 20
"""Largest number of classes in a confusion matrix. With more classes, the most confused pairs are shown instead."""

MAX_PAIRS = 30
"""Largest number of confused pairs that are shown."""

MAX_IMAGE_BYTES = 1_000_000
"""Largest total size of all encoded images, which keeps the page below 2 MB."""

PNG = b"\x89PNG\r\n\x1a\n"


def show(report: Report) -> Html:
    """Return the section's HTML.

    The section shows wrong predictions, the confusion matrix, correct predictions, sample rows, and the results of the
    task's `show` function.
    """
    seen = report.seen
    found = report.predictions
    if found is None:
        return _exhibits(report) or paragraph(
            "No predictions are stored. The training program stores them when a run has finished, unless "
            f"{PREFIX}PREDICT_ROWS is 0 or the task has no predictions."
        )
    right = sum(found.confusion[label][label] for label in range(found.classes))
    wrong = found.rows - right
    rows = ["For ", integer(found.rows), " held-out rows, ", element("code", found.checkpoint), " makes "]
    counts = [integer(right), " right and ", integer(wrong), " wrong predictions: accuracy "]
    counts += [percent(found.accuracy), "."]
    parts = [paragraph(*rows, *counts)]
    if seen.checkpoint and found.checkpoint != seen.checkpoint.name:
        parts.append(paragraph(f"The run has continued since: its newest checkpoint is {seen.checkpoint.name}."))
    most = f", {len(found.mistakes)} of {wrong:,}" if len(found.mistakes) < wrong else ""
    kinds = {
        f"Mistakes, the most certain first{most}": found.mistakes,
        "Correct predictions": found.right,
        "Sample training rows": found.samples,
    }
    shows: list[Html] = []
    room = MAX_IMAGE_BYTES
    left_out = 0
    for title, examples in kinds.items():
        fitting, room = _fit(examples, room)
        left_out += len(examples) - len(fitting)
        shows.append(_examples(title, fitting, found))
    parts += [shows[0], _confusion(found), *shows[1:]] if any(kinds.values()) else [_confusion(found)]
    if left_out:
        note = f"Omitted: {plural(left_out, 'image')} (not in PNG format, or too large for this page)."
        parts.append(paragraph(note, kind="trouble"))
    return join([*parts, _exhibits(report)])


def _fit(examples: Sequence[Example], room: int) -> tuple[list[Example], int]:
    """Return the examples with valid PNGs that fit in the page, and the remaining room in bytes."""
    fitting = []
    for example in examples:
        size = len(example.image) * 4 // 3 + 4
        if example.image.startswith(PNG) and size <= room:
            fitting.append(example)
            room -= size
    return fitting, room


def _examples(title: str, examples: Sequence[Example], found: Predictions) -> Html:
    items = join(element("li", _example(example, found)) for example in examples)
    return join([element("h3", title), element("ul", items, class_="examples") if examples else paragraph("None.")])


def _example(example: Example, found: Predictions) -> Html:
    label = found.name(example.label)
    if example.predicted is None:
        shown = f"label {label}"
        alternative = f"Training row {example.row}: label {label}"
    else:
        predicted = found.name(example.predicted)
        shown = f"✓ {label}" if example.predicted == example.label else f"✗ {label} as {predicted}"
        alternative = f"Held-out row {example.row}: label {label}, predicted {predicted}"
    certainty = element("small", percent(example.probability, 1)) if example.probability is not None else ""
    caption = element("figcaption", join([shown, certainty, element("small", f"row {example.row}")]))
    return element("figure", join([picture(example.image, alternative), caption]))


def _confusion(found: Predictions) -> Html:
    if found.classes > MAX_CLASSES:
        return _pairs(found)
    classes = range(found.classes)
    caption = "Confusion matrix: labels down, predictions across"
    columns = ["label", *map(found.name, classes), "right"]
    head = join(element("th", name, scope="col") for name in columns)
    rows = [element("tr", join(_row(found, label))) for label in classes]
    body = join([titled(caption), element("thead", element("tr", head)), element("tbody", join(rows))])
    return scrolled(caption, element("table", body, class_="confusion"))


def _pairs(found: Predictions) -> Html:
    pairs = (
        (-times, label, predicted)
        for label, row in enumerate(found.confusion)
        for predicted, times in enumerate(row)
        if label != predicted and times
    )
    most = heapq.nsmallest(MAX_PAIRS, pairs)
    confused = sum(len(row) - row.count(0) - bool(row[label]) for label, row in enumerate(found.confusion))
    caption = f"The pairs that are confused most often, {len(most)} of {confused:,}; {found.classes} classes"
    rows = [[found.name(label), found.name(predicted), integer(-times)] for times, label, predicted in most]
    return table(caption, ["label", "predicted", "rows"], rows)


def _row(found: Predictions, label: int) -> Iterator[Html]:
    numbers = found.confusion[label]
    yield element("th", found.name(label), scope="row")
    for predicted, number in enumerate(numbers):
        yield _cell(number, sum(numbers), predicted == label)
    yield element("td", percent(numbers[label] / sum(numbers), 1) if sum(numbers) else "no row")


def _cell(number: int, of: int, right: bool) -> Html:
    if not number:
        return element("td", "0", class_="none")
    opacity = 0.1 + 0.35 * (number / of if right else min(1.0, 10 * number / of))
    return element("td", number, class_="right" if right else "wrong", style=f"--share:{opacity:.2f}")


def _exhibits(report: Report) -> Html:
    """Render what the task's `show` function returned, in the same order."""
    found = report.shown
    if not found:
        return Html("")
    is_older = report.seen.checkpoint and found.checkpoint != report.seen.checkpoint.name
    note = [paragraph("The following is from ", element("code", found.checkpoint), ".")] if is_older else []
    parts, more = cut(found.parts, MAX_PARTS, "parts")
    return join([*note, *map(_exhibit, parts), paragraph(f"{more}.", kind="note") if more else ""])


def _exhibit(part: Exhibit) -> Html:
    if part.images:
        images, more = cut(part.images, MAX_IMAGES, "images")
        titles = [f"{part.title}: image {number}" for number in range(1, len(images) + 1)]
        items = join(element("li", picture(*image)) for image in zip(images, titles, strict=True))
        rest = paragraph(f"{more}.", kind="note") if more else ""
        return join([element("h3", part.title), element("ul", items, class_="examples"), rest])
    if not part.columns:
        return join([element("h3", part.title), element("pre", part.text)])
    # A damaged file can have rows of any length.
    rows = [row for row in part.rows if len(row) == len(part.columns)]
    cells = [[result(name, cell) for name, cell in zip(part.columns, row, strict=True)] for row in rows]
    return table(part.title, part.columns, cells)
