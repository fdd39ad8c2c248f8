"""Tests of `sunspot ui`: its reads from storage, and its pages over HTTP and in a browser."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sunspot.errors import NotFoundError, StorageError, SunspotError
from sunspot.report.html import Html
from sunspot.run import Run
from sunspot.run.logs import LogWriter
from sunspot.run.status import RunState, Status, read_status, write_status_as_is
from sunspot.run.streams import new_stream
from sunspot.settings import JobContext, NodePrice
from sunspot.settings.search_space import SEARCH_LABEL
from sunspot.storage.base import Entry, Storage
from sunspot.storage.local import LocalStorage
from sunspot.ui import page_process, refreshing, site
from sunspot.ui.all_runs import MAX_ENDED, MAX_POINTS, PLACES, AllRuns
from sunspot.ui.http_server import Server
from sunspot.ui.page_process import PageProcess
from sunspot.ui.pages import RunPage
from sunspot.ui.read_only import ReadOnlyStorage
from sunspot.ui.site import Site
from tests.harness import REPOSITORY
from tests.harness.browser import CONTRAST, Browser
from tests.harness.commands import Command
from tests.harness.constants import SetConstants
from tests.harness.documentation import find_commands
from tests.harness.runs import age, begin, report, start
from tests.harness.trained import BEGUN, attempt_metadata, record, trained
from tests.harness.waiting import wait_until


class Counting(LocalStorage):
    """A storage location that counts requests, and can hang or fail on demand."""

    def __init__(self, storage_path: str) -> None:
        super().__init__(storage_path)
        self.asked = Counter[str]()
        self.answers = threading.Event()
        self.answers.set()
        self.fails = False

    def list(self, prefix: str) -> Sequence[Entry]:  # type: ignore[override]
        self._ask("list")
        return super().list(prefix)

    def list_folders(self) -> Sequence[str]:
        self._ask("list")
        return super().list_folders()

    def open(self, key: str, offset: int = 0) -> Any:
        self._ask("read")
        return super().open(key, offset)

    def _ask(self, what: str) -> None:
        self.asked[what] += 1
        self.answers.wait(30)
        if self.fails:
            raise StorageError("the bucket is away")


@pytest.fixture(autouse=True)
def always_due(set_constants: SetConstants) -> None:
    """Make every request read from storage again."""
    set_constants(site, EVERY_S=0.0)
    set_constants(refreshing, PAUSE=0)
    set_constants(site, SOON_S=5.0)


@contextmanager
def served(storage: Storage, address: str = "127.0.0.1", hosts: Sequence[str] = (), **options: Any) -> Iterator[str]:
    """Run a server, and yield its address."""
    with Server(address, 0, Site(storage, **options), hosts) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server.url.replace("0.0.0.0", "127.0.0.1")
        finally:
            server.shutdown()
            thread.join()


def fetch(url: str, **headers: str) -> tuple[int, str, dict[str, str]]:
    """Return the status, body and headers of a response."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=30) as answer:
            return answer.status, answer.read().decode(), dict(answer.headers)
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(), dict(error.headers)


def ended(storage: Storage, name: str, state: RunState = RunState.SUCCEEDED, **fields: Any) -> Run:
    """Return a run that has just ended and has only a status."""
    run = begin(Run(storage, name))
    write_status_as_is(run, Status(state, "job", **{"attempt": 1, "step": 10, "total_steps": 10, **fields}))
    return run


def files(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.stat().st_ino, path.stat().st_mtime_ns) for path in sorted(folder.rglob("*"))}


def test_the_list_shows_the_state_of_each_run_and_can_be_searched(tmp_path: Path) -> None:
    storage = LocalStorage(str(tmp_path))
    trained(Run(storage, "digits"))
    priced = ended(storage, "priced", time=BEGUN + 3600)
    start(priced, "job", at=BEGUN, **attempt_metadata(job=JobContext(prices={"workers": NodePrice(price=11)})))
    ended(storage, "broken", RunState.FAILED, reason="CUDA out of memory", loss=float("nan"))
    storage.write("waiting/submissions/0001-waiting-1234.json", b"{}")
    storage.write("data/rows.parquet", b"not a run")
    before = files(tmp_path)
    with served(storage) as url:
        _, page, headers = fetch(url)
        found = {query: fetch(f"{url}?{query}")[1] for query in ("q=digits", "q=memory", "state=pending", "page=99")}
    assert all(f'href="/run/{name}"' in page for name in ("digits", "broken", "waiting"))
    assert "/run/data" not in page
    assert "all 4</a>" in page
    for word in ("✓ succeeded", "✗ failed", "CUDA out of memory", "pending", ">98.05 %<", ">nan<", "step 188"):
        assert word in page
    assert "Loss from" in page, "the curve"
    assert re.search('data-name="incidents"><data value="1[.0]*">1<', page)
    assert 'data-name="cost">0.136 node hours<' in page
    assert 'data-name="cost">22.00<small>2 node hours<' in page
    assert "script-src 'self'" in headers["Content-Security-Policy"]
    assert "unsafe-inline" not in headers["Content-Security-Policy"].partition("style-src-attr")[0]
    rows = {
        query: [name for name in ("digits", "broken", "waiting") if f"/run/{name}" in found[query]] for query in found
    }
    assert rows == {"q=digits": ["digits"], "q=memory": ["broken"], "state=pending": ["waiting"], "page=99": []}
    assert files(tmp_path) == before, "nothing is written"
    with pytest.raises(StorageError, match="was opened read-only"):
        ReadOnlyStorage(storage).write("digits/stop.json", b"{}")


def test_the_page_of_a_run_shows_its_report_and_the_tail_of_its_log(tmp_path: Path) -> None:
    run = trained(Run(LocalStorage(str(tmp_path)), "digits"))
    for stream, words in (
        ("driver-20261125T000000000Z", "\x1b[32mstep 188\x1b[0m <b>"),
        ("attempt-0002-rank-0001", "rank"),
    ):
        writer = LogWriter(run, stream)
        writer.append(f"{'x' * 400_000}\n{words}\n".encode())
        writer.end()
        writer.flush()
    before = files(tmp_path)
    with served(run.storage) as url:
        _, page, _ = fetch(f"{url}run/digits")
        _, other, _ = fetch(f"{url}run/digits?log=attempt-0002-rank-0001")
        missing = fetch(f"{url}run/nothing")
        refused = fetch(f"{url}run/..%2f..%2fetc")
    for heading in ("Learning", "Incidents", "Log", "Checkpoints", "Settings and versions"):
        assert f"<h2>{heading}</h2>" in page
    assert "step 188 &lt;b&gt;" in page
    assert "\nrank</pre>" in other
    assert len(page) < 1_000_000, "only the end of the log is shown"
    assert "Workers over wall clock" in page
    workers = re.search('Workers that train: .*?class="line a" d="([^"]*)"', page)
    assert workers
    assert workers[1].count(" 182.0") >= 4, "the line is at the bottom twice: before the first step, and after the loss"
    assert f"sunspot checkpoints get digits --storage {tmp_path}" in page
    assert missing[0] == 404
    assert "no run is there" in missing[1]
    assert refused[0] == 404
    assert files(tmp_path) == before, "nothing is written"


def test_the_page_of_a_trial_links_to_its_search(tmp_path: Path) -> None:
    storage = LocalStorage(str(tmp_path))
    for name, search in (("sweep-01", "sweep"), ("sweep", "sweep"), ("other", "no run's name")):
        metadata = attempt_metadata(labels={SEARCH_LABEL: search})
        start(begin(Run(storage, name)), "job", at=BEGUN, **metadata)
    with served(storage) as url:
        pages = {name: fetch(f"{url}run/{name}")[1] for name in ("sweep-01", "sweep", "other")}
    assert [name for name, page in pages.items() if "A trial of" in page] == ["sweep-01"]
    assert 'A trial of <a href="/run/sweep">sweep</a>' in pages["sweep-01"]


def test_the_comparison_page_shows_several_runs(tmp_path: Path) -> None:
    storage = LocalStorage(str(tmp_path))
    trained(Run(storage, "one"))
    other = start(begin(Run(storage, "two")), "job", at=BEGUN, **attempt_metadata(learning_rate=0.5))
    report(Run(storage, "two"), other, record(10, BEGUN + 10, loss=7.5))
    with served(storage) as url:
        _, page, _ = fetch(f"{url}compare?run=one&run=two&run=gone")
        _, alone, _ = fetch(f"{url}compare?run=one")
    [description] = re.findall('aria-label="(Loss on a logarithmic axis over steps[^"]*)"', page)
    assert "One: 1.8" in description
    assert "0.0393 at 188" in description
    assert "Two: 7.5 at 10" in description
    assert '<th scope="row">LEARNING_RATE</th><td>0.001</td><td>0.5</td>' in page.replace(' class="number"', "")
    assert ">EPOCHS<" not in page, "the same in both"
    assert "gone: " in page
    assert "Select two to six runs" in alone


def test_a_copied_checkpoint_is_neither_read_nor_shown_as_verified(tmp_path: Path) -> None:
    run = trained(Run(Counting(str(tmp_path)), "digits"))
    weights = [path for path in tmp_path.rglob("model.pt")]
    for path in weights:
        content = path.read_bytes()
        path.unlink()
        path.write_bytes(content)
    read: list[str] = []
    run.storage.digest = lambda *_: read.append("")  # type: ignore[assignment, method-assign, func-returns-value]
    with served(run.storage) as url:
        _, page, _ = fetch(f"{url}run/digits")
    assert "its bytes are not checked here" in page
    assert "✓ verified" not in page
    assert not read


def test_refreshing_many_ended_runs_takes_few_requests(tmp_path: Path) -> None:
    storage = Counting(str(tmp_path))
    for number in range(200):
        ended(storage, f"run-{number:03d}")
    live = ended(storage, "live", RunState.RUNNING)
    runs = AllRuns(ReadOnlyStorage(storage))
    runs.refresh()
    assert len(runs.known) == 201
    storage.asked.clear()
    for _ in range(3):
        runs.refresh()
    assert storage.asked["read"] == 0, "no status has changed"
    assert storage.asked["list"] <= 3 * (1 + 4 * MAX_ENDED + 2)
    assert {seen.run.name: seen.state for seen in runs.known}["live"] is RunState.RUNNING
    status = read_status(live)
    assert status
    write_status_as_is(live, replace(status, step=11, time=time.time()))
    runs.refresh()
    assert {seen.run.name: seen.status.step for seen in runs.known if seen.status}["live"] == 11
    age(live, 600)
    runs.refresh()
    assert {seen.run.name: seen.state for seen in runs.known}["live"] is RunState.LOST
    ended(storage, "run-150", RunState.FAILED)
    for _ in range(200 // MAX_ENDED + 1):
        runs.refresh()
    assert {seen.run.name: seen.state for seen in runs.known}["run-150"] is RunState.FAILED, (
        "each ended run is read in its turn"
    )


def test_a_record_with_deeply_nested_lists_is_omitted_from_the_curve(tmp_path: Path) -> None:
    run = ended(LocalStorage(str(tmp_path)), "deep")
    report(run, start(run, "job"), {"step": 1, "loss": 2.0})
    [entry] = run.storage.list("deep/metrics")
    run.storage.write(entry.key, b"[" * 9000 + b"\n" + run.storage.read(entry.key))
    runs = AllRuns(ReadOnlyStorage(run.storage)).refresh()
    runs.read_curves(["deep"])
    assert [(point.x, point.y) for point in runs.curves["deep"].points] == [(1, 2.0)]


def test_the_curve_of_a_long_history_takes_few_requests(tmp_path: Path) -> None:
    storage = Counting(str(tmp_path))
    run = ended(storage, "long", RunState.RUNNING)
    first = start(run, "job", at=BEGUN, **attempt_metadata())
    report(run, first, *({"step": n, "time": BEGUN + n, "loss": 1e4 / n, "note": "x" * 200} for n in range(1, 20_001)))
    runs = AllRuns(ReadOnlyStorage(storage))
    runs.refresh()
    storage.asked.clear()
    runs.read_curves(["long"])
    assert storage.asked["read"] <= PLACES + 2, "the attempt is read, too"
    points = runs.curves["long"].points
    steps = [point.x for point in points]
    assert steps == sorted(steps)
    assert steps[0] < 200
    assert steps[-1] == 20_000
    assert PLACES < len(steps) <= MAX_POINTS
    assert all(point.y == 1e4 / point.x for point in points)


def test_the_previous_page_is_shown_if_storage_fails_or_hangs(tmp_path: Path, set_constants: SetConstants) -> None:
    storage = Counting(str(tmp_path))
    ended(storage, "digits")
    set_constants(site, SOON_S=0.5)
    set_constants(refreshing, DEADLINE_S=0.2)
    with served(storage) as url:
        assert "/run/digits" in fetch(url)[1]
        storage.fails = True
        _, failing, _ = fetch(url)
        storage.fails = False
        storage.answers.clear()
        began = time.monotonic()
        _, hanging, _ = fetch(url)
        took = time.monotonic() - began
        storage.answers.set()
        wait_until(lambda: 'role="alert">reading' not in fetch(url)[1], seconds=20)
    for page in (failing, hanging):
        assert "/run/digits" in page
        assert "Below is an earlier reading" in page
    assert "the bucket is away" in failing
    assert "no answer from storage for" in hanging
    assert took < 5


def test_text_from_a_run_is_escaped(tmp_path: Path) -> None:
    hostile = "</style><script>alert(1)</script>\"'><img src=x onerror=alert(1)>"
    run = ended(LocalStorage(str(tmp_path)), "digits", RunState.FAILED, reason=hostile)
    writer = LogWriter(run, "driver-20261125T000000000Z")
    writer.append(f"{hostile}\n".encode())
    writer.flush()
    with served(run.storage) as url:
        pages = [fetch(f"{url}{path}")[1] for path in ("", f"?q={urllib.request.quote(hostile)}", "run/digits")]
    assert "<h2>Log</h2>" in pages[-1], "although no worker has begun"
    for page in pages:
        assert "alert(1)" in page
        assert "<img" not in page
        assert page.count("<script") == 1


def test_write_requests_and_unknown_pages_and_invalid_addresses_are_rejected(tmp_path: Path, sunspot: Command) -> None:
    with served(ended(LocalStorage(str(tmp_path)), "digits").storage) as url:
        assert fetch(f"{url}elsewhere")[0] == 404
        with pytest.raises(urllib.error.HTTPError, match="501"):
            urllib.request.urlopen(url, data=b"write", timeout=10)
        _, _, headers = fetch(f"{url}style.css")
        assert fetch(f"{url}style.css", **{"If-None-Match": headers["ETag"]})[0] == 304
        port = url.rstrip("/").rpartition(":")[2]
        assert sunspot("ui", "--port", port) == 2
        assert f"127.0.0.1, port {port}: " in sunspot.err
    assert sunspot("ui", "--address", "no.such.host.invalid") == 2


@pytest.mark.parametrize(
    ("address", "hosts", "accepted", "refused"),
    [
        (
            "127.0.0.1",
            ["runs.example"],
            ["localhost", "LOCALHOST:1", "127.0.0.1:80", "127.9.9.9", "[::1]:8321", "runs.example", "Runs.Example:443"],
            ["rebind.example", "10.0.0.7", "runs.example.evil", "localhost.evil", "[::1", "", "localhost@evil.example"],
        ),
        (
            "0.0.0.0",
            ["sunspot-ui", "sunspot-ui.sunspot.svc"],
            ["localhost:8321", "127.0.0.1", "10.0.0.7:8321", "[fd00::7]:80", "sunspot-ui", "sunspot-ui.sunspot.svc:80"],
            ["rebind.example", "sunspot-ui.evil.example", ""],
        ),
    ],
)
def test_a_server_rejects_foreign_host_names(
    tmp_path: Path, address: str, hosts: list[str], accepted: list[str], refused: list[str]
) -> None:
    ended(LocalStorage(str(tmp_path)), "digits")
    with served(LocalStorage(str(tmp_path)), address, hosts) as url:
        statuses = {host: fetch(f"{url}run/digits", Host=host)[:2] for host in (*accepted, *refused)}
    assert [host for host in accepted if statuses[host][0] != 200] == []
    assert [host for host in refused if statuses[host][0] != 403 or "digits" in statuses[host][1]] == []
    assert "--host NAME" in statuses["rebind.example"][1]


def ask(url: str, request: bytes) -> bytes:
    """Return a server's response to these bytes."""
    place = urllib.parse.urlsplit(url)
    with socket.create_connection((str(place.hostname), place.port), timeout=30) as connection:
        connection.sendall(request)
        return b"".join(iter(lambda: connection.recv(1 << 16), b""))


@pytest.mark.parametrize(
    ("status", "request_"),
    [
        (b"501", b"POST / HTTP/1.1\r\nHost: localhost\r\n\r\n"),
        (b"400", b"GET / HTTP/9x\r\nHost: localhost\r\n\r\n"),
        (b"431", b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 200 + b"\r\n"),
        (b"403", b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n"),
        (b"404", b"GET /elsewhere HTTP/1.1\r\nHost: localhost\r\n\r\n"),
    ],
)
def test_error_responses_have_the_security_policy(tmp_path: Path, status: bytes, request_: bytes) -> None:
    with served(LocalStorage(str(tmp_path))) as url:
        head = ask(url, request_).partition(b"\r\n\r\n")[0]
    assert head.split()[1] == status
    for name in (b"Content-Security-Policy: default-src 'none'", b"X-Content-Type-Options: nosniff"):
        assert head.count(name) == 1


def test_clients_that_send_no_request_do_not_block_other_clients(tmp_path: Path, set_constants: SetConstants) -> None:
    set_constants("sunspot.machine.local_http", MAX_WAITING=20, HEAD_WITHIN_S=5.0)
    with served(ended(LocalStorage(str(tmp_path)), "digits").storage) as url, contextlib.ExitStack() as open_ones:
        place = urllib.parse.urlsplit(url)
        began = time.monotonic()
        slow = []
        for _ in range(60):
            connection = socket.create_connection((str(place.hostname), place.port), timeout=30)
            slow.append(open_ones.enter_context(connection))
            connection.sendall(b"GET / HTTP/1.1\r\nHost: ")
        assert [fetch(f"{url}style.css")[0] for _ in range(10)] == [200] * 10
        assert slow[0].recv(1) == b"", "the connection that has waited longest is closed"
        for connection in slow[-5:]:  # single bytes do not make a request, either
            with contextlib.suppress(OSError):
                connection.sendall(b"l")
        assert slow[-1].recv(1) == b""
        assert 4 < time.monotonic() - began < 25


# ------------------------------------------------------------------------------------------- a process that reads pages


def read_as_told(storage: Storage, names: Sequence[str]) -> RunPage:
    """Return a page, or fail in the way that the run's name describes."""
    [name] = names
    if name == "too-large":
        return RunPage("", Html("x" * (400 << 20)))
    if name == "without-end":
        time.sleep(600)
    if name == "killed":
        os.kill(os.getpid(), signal.SIGTERM)
    if name == "missing":
        raise NotFoundError("missing: no run is there")
    if name == "defect":
        raise KeyError("of the program")
    return RunPage(name, Html(f"process {os.getpid()} of {storage.locate('')}"))


def test_a_page_that_exhausts_memory_does_not_affect_other_pages(tmp_path: Path, set_constants: SetConstants) -> None:
    set_constants(page_process, MOST_BYTES=256 << 20, READ_WITHIN_S=20.0)
    with contextlib.closing(PageProcess(str(tmp_path))) as pages:
        one = pages.read(read_as_told, ["digits"])
        assert str(tmp_path) in one.body
        assert str(os.getpid()) not in one.body
        assert pages.read(read_as_told, ["digits"]) == one, "the same process made it"
        with pytest.raises(NotFoundError, match="missing: no run is there"):
            pages.read(read_as_told, ["missing"])
        with pytest.raises(SunspotError, match="of the program"):
            pages.read(read_as_told, ["defect"])
        assert pages.read(read_as_told, ["digits"]) == one
        with pytest.raises(SunspotError, match="page of too-large cannot be shown: making it takes more than 256 MiB"):
            pages.read(read_as_told, ["too-large"])
        other = pages.read(read_as_told, ["digits"])
        assert other != one, "another process made it"
        with pytest.raises(SunspotError, match=r"page of killed cannot be shown: .* ended with -15"):
            pages.read(read_as_told, ["killed"])
        assert pages.read(read_as_told, ["digits"]) != other
        set_constants(page_process, READ_WITHIN_S=0.2)
        with pytest.raises(SunspotError, match=r"page of without-end cannot be shown: rendering took more than 0 s"):
            pages.read(read_as_told, ["without-end"])


def test_a_run_that_cannot_be_shown_is_reported_with_the_reason_and_the_other_runs_are_shown(
    tmp_path: Path, set_constants: SetConstants
) -> None:
    set_constants(page_process, MOST_BYTES=256 << 20)
    set_constants(site, FIRST_S=60.0)
    storage = LocalStorage(str(tmp_path))
    trained(Run(storage, "digits"))
    trained(Run(storage, "hostile"))
    deep = b'{"checkpoint":"step-00000188-attempt-0002","step":188,"parts":[{"title":"","columns":["a"],"rows":['
    storage.write("hostile/shown.json", deep + b"[]," * 5_000_000 + b"[]]}]}")
    with contextlib.closing(PageProcess(str(tmp_path))) as pages, served(storage, read_page=pages.read) as url:
        status, page, _ = fetch(f"{url}run/hostile")
        assert (status, "hostile cannot be shown: making it takes more than 256 MiB of memory" in page) == (503, True)
        assert "Loss over steps" in fetch(f"{url}run/digits")[1]
        assert "/run/hostile" in fetch(url)[1]


def test_the_list_does_not_read_the_events_of_a_huge_run(tmp_path: Path) -> None:
    storage = LocalStorage(str(tmp_path))
    for name in ("digits", "large"):
        trained(Run(storage, name))
    line = json.dumps({"attempt": 1, "step": 5, "time": BEGUN + 20, "event": "note", "detail": "x" * 100_000}) + "\n"
    storage.write(f"large/events/{new_stream(1)}-0000000000-0000000099.jsonl", (line * 100).encode())
    runs = AllRuns(ReadOnlyStorage(storage))
    runs.refresh()
    runs.read_curves(["digits", "large"])
    incidents = {name: curve.incidents for name, curve in runs.curves.items()}
    assert incidents == {"digits": 1, "large": None}


def test_the_ui_command_prints_its_address_and_exits_on_ctrl_c(tmp_path: Path) -> None:
    ended(LocalStorage(str(tmp_path)), "digits")
    [words] = find_commands("sh ui")
    command = [REPOSITORY / words.split()[0], *words.split()[1:], "--storage", str(tmp_path), "--port", "0", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        printed = json.loads(process.stdout.readline())
        try:
            assert "/run/digits" in fetch(printed["url"])[1]
            assert "<h2>Incidents</h2>" in fetch(f"{printed['url']}run/digits")[1]
        finally:
            process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
    assert printed["storage"] == str(tmp_path)


# -------------------------------------------------------------------------------------------------------------- browser

NOW = "document.dispatchEvent(new Event('visibilitychange'))"
"""A script that refreshes the page immediately instead of every ten seconds."""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1400, 900, 400])
def test_a_browser_shows_the_pages(browser: Browser, tmp_path: Path, width: int, scheme: str) -> None:
    storage = LocalStorage(str(tmp_path))
    trained(Run(storage, "digits"))
    trained(Run(storage, "other"))
    ended(storage, "broken", RunState.FAILED, reason="a reason " + "without_a_place_to_break" * 20)
    with served(storage) as url:
        for path in ("", "run/digits", "compare?run=digits&run=other"):
            browser.show(url + path, width, scheme)
            assert browser.messages() == []
            assert browser.run("return document.documentElement.scrollWidth") <= width, "the page scrolls sideways"
            assert browser.run(CONTRAST) == []
            unnamed = "return [...document.querySelectorAll('svg:not([aria-hidden])')].filter(s => !s.ariaLabel).length"
            assert browser.run(unnamed) == 0
            fields = "return [...document.querySelectorAll('input:not([type=hidden])')].every(i => i.ariaLabel)"
            assert browser.run(fields)


def test_an_open_page_shows_that_a_run_is_lost(browser: Browser, tmp_path: Path) -> None:
    storage = LocalStorage(str(tmp_path))
    run = ended(storage, "digits", RunState.RUNNING)
    with served(storage) as url:
        browser.show(url, 1400, "light")
        read = "return document.querySelector('[data-name=state]').textContent"
        assert browser.run(read) == "● running"
        browser.run("const tick = document.querySelector('[type=checkbox]'); tick.focus(); tick.click()")
        age(run, 600)
        browser.run(NOW)
        wait_until(lambda: browser.run(read).startswith("✗ lost"), seconds=20)
        assert "lost 1" in browser.run("return document.querySelector('#counts').textContent")
        assert browser.run("return document.querySelector('[type=checkbox]').checked")
        assert browser.run("return document.activeElement.value") == "digits"
        assert browser.run("return document.querySelector('#lost').hidden")
    browser.run(NOW)
    wait_until(lambda: not browser.run("return document.querySelector('#lost').hidden"), seconds=20)
    assert "has not answered" in browser.run("return document.querySelector('#lost').textContent")
