"""Answers requests with pages that were rendered from the newest data in storage."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from sunspot.formatting import visible
from sunspot.report.html import Html, element, join, paragraph
from sunspot.report.page import STYLE, whole_page
from sunspot.run import Run
from sunspot.run.logs import STREAM, list_streams, read_tail
from sunspot.run.objects import RUN
from sunspot.storage.base import Storage
from sunspot.ui.all_runs import AllRuns
from sunspot.ui.list_page import Query, show_all
from sunspot.ui.pages import PageReader, RunPage, read_comparison, read_run
from sunspot.ui.read_only import ReadOnlyStorage
from sunspot.ui.refreshing import Reading, RefreshingValue
from sunspot.ui.run_pages import BACK, LOG_PLACEHOLDER, Log, show_log

EVERY_S = 10.0
"""Seconds between two reads of a page's content. A run writes its status at the same interval."""

SOON_S = 1.0
"""Longest time in seconds that a request waits for a read if an earlier reading can be shown."""

FIRST_S = 8.0
"""Longest time in seconds that a request waits for the first read."""

MAX_PAGES = 12
"""Largest number of cached pages and logs."""

MAX_COMPARED = 6
"""Largest number of runs in a comparison. More curves would be hard to distinguish."""

LOG_BYTES = 32 << 10
"""Largest number of bytes of a log on a page."""

MAX_STREAMS = 12
"""Largest numbers of links to driver logs and to worker logs."""

HEAD = (
    '<link rel="icon" href="data:,"><link rel="stylesheet" href="/style.css"><script src="/ui.js" defer></script>'
    f'<noscript><meta http-equiv="refresh" content="{EVERY_S:.0f}"></noscript>'
)

FILES = {
    "/style.css": ((STYLE, Path(__file__).with_name("ui.css")), "text/css; charset=utf-8"),
    "/ui.js": ((Path(__file__).with_name("ui.js"),), "text/javascript; charset=utf-8"),
}
"""The files served at each address, concatenated, and their content type."""


@dataclass(frozen=True)
class Answer:
    """A response to a browser."""

    body: bytes
    status: HTTPStatus = HTTPStatus.OK
    kind: str = "text/html; charset=utf-8"


class Site:
    """The pages of all runs in a storage location."""

    def __init__(
        self, storage: Storage, read_page: Callable[[PageReader, Sequence[str]], RunPage] | None = None
    ) -> None:
        """Prepare to answer requests. `read_page` reads and renders run pages.

        By default, this process renders the pages. Pass `PageProcess.read` to render them in a separate process.
        """
        self._storage = ReadOnlyStorage(storage)
        self._read_page = read_page or (lambda read, names: read(self._storage, names))
        self._runs = AllRuns(self._storage)
        self._all = RefreshingValue("reading the runs", self._runs.refresh, EVERY_S)
        self._kept = OrderedDict[str, RefreshingValue[Any]]()
        "An LRU cache of readings, with the newest last."
        self._lock = threading.Lock()

    def answer(self, target: str) -> Answer:
        """Return the response to a request for `target`, which is a path with an optional query."""
        parts = urlsplit(target)
        fields = parse_qsl(parts.query)
        folder, _, name = parts.path.strip("/").partition("/")
        if parts.path == "/":
            return self._list(Query.parse(dict(fields)))
        if folder == "run" and RUN.fullmatch(name):
            return self._run(name, dict(fields).get("log", ""))
        if parts.path == "/compare":
            return self._compare(list(dict.fromkeys(v for key, v in fields if key == "run" and RUN.fullmatch(v))))
        if parts.path in FILES:
            paths, kind = FILES[parts.path]
            return Answer(b"".join(path.read_bytes() for path in paths), kind=kind)
        nothing = join([BACK, element("main", element("h1", "There is no such page"))])
        return _page("There is no such page", nothing, HTTPStatus.NOT_FOUND)

    def _list(self, query: Query) -> Answer:
        reading = _await(self._all, bool(self._runs.seen))
        notes = _troubles(reading)
        left = self._runs.total - len(self._runs.seen)
        names = [seen.run.name for seen in query.on_page(query.choose(self._runs.known))]
        if left:
            notes.append(paragraph(f"{left:,} more are being read.", kind="note"))
        elif names:
            curves = self._begin(f"the curves of {' '.join(names)}", partial(self._runs.read_curves, names))
            curves.get(SOON_S)
        place = paragraph("Read from ", element("code", self._storage.locate("")), ".")
        return _page(
            "Runs", join([show_all(self._runs.known, self._runs.curves, query, notes), element("footer", place)])
        )

    def _run(self, name: str, stream: str) -> Answer:
        run = Run(self._storage, name)
        wanted = stream if STREAM.fullmatch(stream) else ""
        pages = self._begin(f"run {name}", partial(self._read_page, read_run, [name]), limited=False)
        logs = self._begin(f"log {name} {wanted}", lambda: read_log(run, wanted))
        reading, printed = _await(pages), _await(logs)
        notes = [*_troubles(reading), *_troubles(printed)]
        title, status = name, HTTPStatus.OK
        page: RunPage | None = reading.value
        if page is None:
            parts = [element("main", join([element("h1", name), *(notes or [paragraph("The run is being read.")])]))]
            if reading.trouble:
                status = HTTPStatus.NOT_FOUND if reading.missing else HTTPStatus.SERVICE_UNAVAILABLE
        else:
            title = page.title
            parts = [*notes, Html(page.body.replace(LOG_PLACEHOLDER, show_log(name, printed.value)))]
        return _page(title, join([BACK, element("div", join(parts), id="run")]), status)

    def _compare(self, names: Sequence[str]) -> Answer:
        chosen, left = names[:MAX_COMPARED], names[MAX_COMPARED:]
        what = f"the comparison of {' '.join(chosen)}"
        reading = _await(self._begin(what, partial(self._read_page, read_comparison, chosen), limited=False))
        notes = _troubles(reading)
        if left:
            notes.append(
                paragraph(f"At most {MAX_COMPARED} runs are compared. Left out: {', '.join(left)}.", kind="note")
            )
        page: RunPage | None = reading.value
        body = page.body if page else element("main", element("h1", "Compare runs"))
        if page is None and not notes:
            notes.append(paragraph("The runs are being read."))
        return _page("Compare runs", join([*notes, body]))

    def _begin(self, what: str, read: Callable[[], Any], limited: bool = True) -> RefreshingValue[Any]:
        """Return the refreshing value for `what`, and start a read if one is due."""
        with self._lock:
            found = self._kept.setdefault(what, RefreshingValue(f"reading {what}", read, EVERY_S, limited))
            self._kept.move_to_end(what)
            if len(self._kept) > MAX_PAGES:
                self._kept.popitem(last=False)
        found.get(0)
        return found


def _await(value: RefreshingValue[Any], known: bool = False) -> Reading[Any]:
    return value.get(SOON_S if known or value.get(0).value is not None else FIRST_S)


def read_log(run: Run, stream: str) -> Log | None:
    """Return the tail of the log `stream`, or None if the run has no logs.

    If the run has no log of this name, return the tail of the driver's newest log.
    """
    streams = sorted(list_streams(run), key=lambda name: (name.startswith("driver"), name), reverse=True)
    if not streams:
        return None
    chosen = stream if stream in streams else streams[0]
    printed = read_tail(run, chosen, LOG_BYTES).decode(errors="replace")
    drivers = [name for name in streams if name.startswith("driver")][:MAX_STREAMS]
    return Log(chosen, visible(printed), [*drivers, *streams[len(drivers) :][:MAX_STREAMS]])


def _troubles(reading: Reading[Any], what: str = "") -> list[Html]:
    """Return a list with an alert if the latest read failed, otherwise an empty list."""
    if not reading.trouble:
        return []
    rest = " Below is an earlier reading." if reading.value is not None else ""
    return [element("p", f"{what}{reading.trouble}.{rest}", class_="trouble", role="alert")]


def _page(title: str, body: Html, status: HTTPStatus = HTTPStatus.OK) -> Answer:
    lost = element("p", "", id="lost", class_="trouble", role="alert", hidden="")
    return Answer(whole_page(title, join([lost, body]), HEAD), status)
