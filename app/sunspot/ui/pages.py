"""Reads and renders run pages, in the server's process or in a separate process (page_process.py)."""

import contextlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

from sunspot.errors import NotFoundError, SunspotError
from sunspot.report.html import Html, element, paragraph
from sunspot.report.model import Report, read_report
from sunspot.report.search import read_search, show_search
from sunspot.run import Run
from sunspot.run.search import read_results
from sunspot.run.seen import look
from sunspot.storage.base import Storage
from sunspot.ui.run_pages import show_comparison, show_run


class RunPage(NamedTuple):
    """A page about one or several runs."""

    title: str
    body: Html


PageReader = Callable[[Storage, Sequence[str]], RunPage]
"""A function that reads the page of the runs with these names."""


def read_run(storage: Storage, names: Sequence[str]) -> RunPage:
    """Return the page of a run or a search. Checkpoint files are not read."""
    [name] = names
    run = Run(storage, name)
    with contextlib.suppress(NotFoundError):
        return RunPage(name, show_search(*read_search(run), link="/run/{}"))
    report = _read_report(run)
    return RunPage(f"{name}: {report.seen.state}", show_run(report))


def read_comparison(storage: Storage, names: Sequence[str]) -> RunPage:
    """Return a page that compares several runs, with notes about runs that cannot be read."""
    reports, notes = list[Report](), list[Html]()
    for name in names:
        run = Run(storage, name)
        try:
            if read_results(run):
                notes.append(paragraph(f"{name} is a search, which cannot be compared.", kind="note"))
            else:
                reports.append(_read_report(run))
        except SunspotError as error:
            notes.append(element("p", f"{name}: {error}.", class_="trouble", role="alert"))
    return RunPage("Compare runs", show_comparison(reports, notes))


def _read_report(run: Run) -> Report:
    seen = look(run)
    if not seen.exists:
        raise NotFoundError(f"{run.location}: no run is there")
    return read_report(seen, read_bytes=False)
