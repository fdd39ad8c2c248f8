"""Delivers to a tracking service whatever it does not have of a run yet."""

from __future__ import annotations

import hashlib
import logging
import tempfile
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge, MinLen

from sunspot.errors import DamageError, NotFoundError, TrackingError, shorten
from sunspot.formatting import plural
from sunspot.metric_names import HELD_OUT
from sunspot.report import FILE
from sunspot.run import Run, to_json
from sunspot.run.attempts import Attempt, Span, lineage, read_attempts, refuse_if_superseded, step_of
from sunspot.run.checkpoints import Checkpoint, choose, classify, compare_bytes, list_directories
from sunspot.run.history import iter_records, list_journal, read_journal
from sunspot.run.incidents import goodput, read_receipts
from sunspot.run.objects import Count, Record, read, read_if_exists, read_if_usable
from sunspot.run.status import Status, read_status
from sunspot.run.streams import Segment
from sunspot.settings import PREFIX
from sunspot.tracking.service import SERVICES, Point, RefusedError, RunIdentity, Service

log = logging.getLogger(__name__)

RECORDS_AT_ONCE = 50
"""Records in a request: MLflow takes 1,000 metrics, and a record has some 15."""

NO_PARAMETERS = ("JOB_ID", "NOTICE_S", "TRACKING", "TRACKING_PROJECT")
"""Settings of a single start of the run, or of its delivery."""

NO_METRICS = ("step", "time", "steps")

MODEL = "model.pt"


class Delivery:
    """Delivers one run to one service, resuming where an earlier delivery ended.

    A record of the metric history is delivered once a checkpoint covers its step: a loss takes the run back no further,
    so each step is shown once. Should even a checkpoint be lost, the steps that are repeated are not sent again.
    """

    def __init__(self, run: Run, name: str, project: str, driver: str = "") -> None:
        """`driver` is the start of a driver for which it delivers; empty: whoever owns the run."""
        self.run, self.name, self._project, self._driver = run, name, project, driver
        self.delivered = read_delivered(run, name)
        self.place = ""
        "The tracking run's address; empty until `deliver` has opened it."
        self.attempt = 0
        "The run's newest attempt."
        self._service: Service | None = None
        self._segments: set[Segment] = set()
        "Those of the metric history that have been delivered completely."
        self._described = 0
        "The attempt whose parameters the service has."
        self._scratch = tempfile.TemporaryDirectory(prefix="sunspot-tracking-")

    def deliver(self) -> None:
        """Send what is not delivered yet. After `TrackingError` or `StorageError`, the next call sends the rest.

        Raises `SupersededError` when the driver has lost the run.
        """
        attempts = read_attempts(self.run)
        refuse_if_superseded(attempts, "", self._driver)
        if not attempts:
            return  # nothing to deliver yet
        self.attempt = attempts[-1].number
        service = self._open(attempts)
        self._describe(service, attempts)
        spans = lineage(attempts)
        final = self._final_step(spans)
        segments = list_journal(self.run, "metrics", spans)
        self._segments &= set(segments)
        for segment in segments:
            if segment in self._segments:
                continue
            records = list(iter_records(self.run, "metrics", spans, [segment]))
            new = iter([record for record in records if self._is_new(record, final)])
            while batch := list(islice(new, RECORDS_AT_ONCE)):
                self._send(service, batch)
            if all(record["step"] <= final for record in records):
                self._segments.add(segment)

    def finish(self) -> None:
        """Send the rest and, if the run has ended, its report, best model and state. Raises like `deliver`."""
        refuse_if_superseded(read_attempts(self.run), "", self._driver)
        if self._service is None and not self.missing():
            return  # opening it would show the tracking run as running again
        self.deliver()
        status, service = read_status(self.run), self._service
        if status is None or service is None:
            return
        ended = _end_of(status)
        if ended:
            self._attach_report(service)
            tags = {"sunspot.state": str(status.state), "sunspot.checkpoint": self._attach_model(service)}
            service.describe({}, {**tags, **self._summarize(service, status)})
        service.close(status.state if ended else None)
        self._service = None
        self._record(replace(self.delivered, ended=ended), arrived=True)

    def leave(self) -> None:
        """End this delivery as it stands; the tracking run goes on."""
        if self._service:
            with suppress(TrackingError):
                self._service.close(None)

    def missing(self) -> str:
        """Return what has not been delivered, in words; empty if everything has. Raises `StorageError`."""
        spans = lineage(read_attempts(self.run))
        final = self._final_step(spans)
        steps = [record["step"] for record in iter_records(self.run, "metrics", spans) if self._is_new(record, final)]
        status = read_status(self.run)
        parts = [f"{plural(len(steps), 'record')} of the steps {steps[0]} to {steps[-1]}"] if steps else []
        if spans and status and _end_of(status) not in ("", self.delivered.ended):
            parts.append("what comes at the end (report, model, state)")
        return "; ".join(parts)

    def _open(self, attempts: list[Attempt]) -> Service:
        if self._service is None:
            first = attempts[0]
            text = f"{self.run.location} {first.owner} {first.time}"
            identity = RunIdentity(hashlib.sha256(text.encode()).hexdigest()[:16], self.run.name, self.run.location)
            service = SERVICES[self.name](self._project, identity)
            known = read_tracking_run(self.run, self.name)
            if known is None:
                mine = service.find_or_create()
                known = claim_tracking_run(self.run, self.name, mine)
                if known != mine:
                    service.discard(mine)
            self.place = service.open(known)
            self._service, self._described = service, 0
        return self._service

    def _describe(self, service: Service, attempts: list[Attempt]) -> None:
        newest = attempts[-1]
        if self._described == newest.number:
            return
        named = {name.removeprefix(PREFIX): value for name, value in newest.metadata.settings.items()}
        parameters = {name.lower(): value for name, value in named.items() if value and name not in NO_PARAMETERS}
        parameters |= {f"version.{name}": value for name, value in newest.metadata.versions.items()}
        workers = [attempt.metadata.world_size for attempt in attempts]
        sizes = [size for size, before in zip(workers, [None, *workers], strict=False) if size != before]
        tags = {"sunspot.attempts": str(len(attempts)), "sunspot.workers": ", ".join(map(str, sizes))}
        try:
            service.describe(parameters, tags)
        except RefusedError as error:
            log.warning(f"tracking: lost, as they are refused: the parameters of attempt {newest.number}: {error}")
        self._described = newest.number

    def _final_step(self, spans: list[Span]) -> int:
        """Return the step of the newest checkpoint, up to which the history is final; -1: none."""
        counted, _, _ = classify(list_directories(self.run), spans)
        return step_of(counted[-1]) if counted else -1

    def _is_new(self, record: dict[str, Any], final: int) -> bool:
        step, attempt = record["step"], record["attempt"]
        if _is_evaluation(record):
            return (self.delivered.step, self.delivered.attempt) < (step, attempt) and step <= final
        return self.delivered.step < step <= final

    def _send(self, service: Service, records: list[dict[str, Any]]) -> None:
        refused = 0
        try:
            service.send([to_point(record) for record in records])
        except RefusedError as error:
            if len(records) > 1:  # find the one that is refused
                for record in records:
                    self._send(service, [record])
                return
            refused = 1
            log.warning(f"tracking: lost, as it is refused: the record of step {records[0]['step']}: {error}")
        sent, last = self.delivered, records[-1]
        known, lost = sent.records + len(records) - refused, sent.refused + refused
        now = replace(sent, step=last["step"], attempt=last["attempt"], records=known, refused=lost)
        self._record(now, service.acknowledges)

    def _attach_report(self, service: Service) -> None:
        content = read_if_exists(lambda: self.run.storage.read(self.run.key(FILE)))
        digest = hashlib.sha256(content or b"").hexdigest()
        if content and digest != self.delivered.report:
            file = Path(self._scratch.name, FILE)
            file.write_bytes(content)
            service.attach(file, "")
            self._record(replace(self.delivered, report=digest), service.acknowledges)

    def _attach_model(self, service: Service) -> str:
        """Deliver the best model; returns its checkpoint's name, or '' if there is none."""
        try:
            best, notes = choose(self.run, "best")
            if MODEL not in best.files:  # sharded; only the last one has a whole model as well
                best, notes = choose(self.run, "newest")
            for text in notes:
                log.info(f"tracking: {text}")
            if MODEL not in best.files:
                raise NotFoundError(f"{best.name} has no {MODEL}")
            if best.name != self.delivered.model:
                service.attach(self._fetch(best), "model")
                self._record(replace(self.delivered, model=best.name), service.acknowledges)
        except (NotFoundError, DamageError) as error:
            log.warning(f"tracking: no model to deliver: {shorten(error)}")
            return ""
        return best.name

    def _fetch(self, checkpoint: Checkpoint) -> Path:
        """Return a verified local copy of a checkpoint's model."""
        file = Path(self._scratch.name, MODEL)
        with file.open("wb") as copy:
            faults = compare_bytes(self.run, checkpoint, MODEL, copy.write)
        if faults:
            raise DamageError(f"{checkpoint.name}: {faults[0]}")
        return file

    def _summarize(self, service: Service, status: Status) -> dict[str, str]:
        """Return incidents as a tag, and send the goodput as a metric, so that runs can be compared by it."""
        attempts, receipts = read_attempts(self.run), read_receipts(read_journal(self.run, "events"))
        share = goodput(attempts, receipts, status.time)
        if share is not None:
            service.send([Point(max(0, self.delivered.step), status.time, {"goodput": share})])
        return {"sunspot.incidents": str(sum(receipt.cause.incident for receipt in receipts))}

    def _record(self, delivered: Delivered, arrived: bool) -> None:
        """Record the progress, if it has `arrived`; raises `StorageError`: then later data is delivered again."""
        self.delivered = delivered
        if arrived:
            self.run.storage.write(self.run.key("tracking", f"{self.name}-delivered.json"), to_json(asdict(delivered)))


def _end_of(status: Status) -> str:
    """Return what identifies the end of this start of the run; empty while it runs."""
    return f"{status.state} {status.time:.3f}" if status.state.terminal else ""


def to_point(record: dict[str, Any]) -> Point:
    """Return the metrics of a record; of an evaluation those of held-out rows, as an earlier record has the rest."""
    values = {
        name: float(value)
        for name, value in record.items()
        if isinstance(value, (int, float)) and name not in NO_METRICS
        if name.startswith(HELD_OUT) or not _is_evaluation(record)
    }
    return Point(record["step"], record.get("time") or 0.0, values)


def _is_evaluation(record: dict[str, Any]) -> bool:
    """Return whether a record is only the evaluation of an epoch that an earlier attempt had completed."""
    return record.get("steps") == 0


@dataclass(frozen=True)
class TrackingRun:
    """The run of a tracking service that shows this one; `<service>.json` in the run."""

    id: Annotated[str, MinLen(1)]


@dataclass(frozen=True)
class Delivered:
    """How much of a run a tracking service has; `<service>-delivered.json` in the run."""

    step: Annotated[int, Ge(-1)] = -1
    "All records up to this step have been delivered or refused."
    attempt: Count = 0
    "The attempt of the last of them: a later attempt may add an evaluation of the same step."
    records: Count = 0
    "Records that the service has."
    refused: Count = 0
    "Records that it refused."
    report: str = ""
    "SHA-256 of its copy of the report."
    model: str = ""
    "The checkpoint of its model."
    ended: str = ""
    "The end that it has recorded (`_end_of`)."


def read_tracking_run(run: Run, service: str) -> str | None:
    """Return the id of the tracking run; None if there is none yet, or it is damaged. Raises `StorageError`."""
    found = _read(run, TrackingRun, f"{service}.json")
    return found.id if found else None


def claim_tracking_run(run: Run, service: str, identity: str) -> str:
    """Make `identity` the id of the tracking run unless it has one that can be read; returns the id that it has."""
    file, content = f"{service}.json", to_json(asdict(TrackingRun(identity)))
    if not run.storage.create(run.key("tracking", file), content):
        if known := _read(run, TrackingRun, file):
            return known.id
        run.storage.write(run.key("tracking", file), content)
    return identity


def read_delivered(run: Run, service: str) -> Delivered:
    """Return the delivery's progress; raises `StorageError`. When it is damaged, all is delivered again."""
    return _read(run, Delivered, f"{service}-delivered.json") or Delivered()


def _read(run: Run, schema: type[Record], file: str) -> Record | None:
    return read_if_usable(lambda: read(run, schema, "tracking", file))
