"""Delivers the parts of a run that a tracking service does not have yet."""

from __future__ import annotations

import hashlib
import logging
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Annotated

from annotated_types import Ge, MinLen

from sunspot.errors import DamageError, NotFoundError, StorageError, TrackingError, shorten
from sunspot.formatting import plural
from sunspot.metric_names import HELD_OUT, MetricRecord
from sunspot.report import FILE
from sunspot.run import Run, to_json
from sunspot.run.attempts import Attempt, Span, lineage, read_attempts, refuse_if_superseded, step_of
from sunspot.run.checkpoints import Checkpoint, choose, classify, compare_bytes, list_directories
from sunspot.run.handover import left_for_move
from sunspot.run.history import iter_records, list_journal, read_journal
from sunspot.run.incidents import goodput, read_receipts
from sunspot.run.objects import Count, Record, read, read_if_exists, read_if_usable
from sunspot.run.status import Status, read_status
from sunspot.run.streams import Segment
from sunspot.settings import PREFIX
from sunspot.tracking.service import SERVICES, Point, RefusedError, RunIdentity, Service

log = logging.getLogger(__name__)

RECORDS_AT_ONCE = 50
"""Number of records per request. MLflow accepts 1,000 metrics, and a record has about 15."""

TURN_AFTER_S = 30.0
"""Seconds after a driver's claim within which an earlier driver's delivery surely ends. It looks for a new owner every
10 s, and before each request. A request takes up to 10 s."""

TURN_CHECK_S = 1.0
"""Seconds between two checks of whether an earlier driver's delivery has ended."""

NO_PARAMETERS = ("JOB_ID", "NOTICE_S", "TRACKING", "TRACKING_PROJECT")
"""Settings that are not delivered, because they concern a single start of the run or the delivery itself."""

NO_METRICS = ("step", "time", "steps")

MODEL = "model.pt"


class Delivery:
    """Delivers one run to one service, continuing where an earlier delivery ended.

    A metric record is delivered once there is a checkpoint of its step or of a later step, because the run normally
    repeats only steps after its newest checkpoint. Each step is delivered only once. If a checkpoint is lost and the
    run repeats delivered steps, these steps are not sent again.

    Drivers deliver in turn, because a run has several drivers while it moves. A driver's turn begins once the driver
    has claimed the run and the earlier driver's delivery has ended (`_take_turn`).
    """

    def __init__(self, run: Run, name: str, project: str, driver: str = "") -> None:
        """Prepare the delivery.

        If `driver` is not empty, the delivery begins once `driver` has claimed the run, and ends once another driver
        takes over the run from `driver`.
        """
        self.run = run
        self.name = name
        self._project = project
        self._driver = driver
        self.delivered = read_delivered(run, name)
        self.place = ""
        "The address of the tracking run. Empty until `deliver` has opened the tracking run."
        self.attempt = 0
        "The number of the run's newest attempt."
        self._claimed: float | None = None
        "The monotonic time at which the driver's claim was first seen."
        self._service: Service | None = None
        self._segments: set[Segment] = set()
        "The segments of the metric history that have been delivered completely."
        self._described = 0
        "The number of the attempt with the parameters that the service received last."
        self._scratch = tempfile.TemporaryDirectory(prefix="sunspot-tracking-")

    def deliver(self) -> bool:
        """Send all records that have not been delivered yet. Return False if it is not this driver's turn.

        After a `TrackingError` or `StorageError`, the next call sends the remaining records. Raises
        `SupersededError` if another driver has taken over the run.
        """
        attempts = self._read_own_attempts()
        if not self._has_claimed(attempts) or not self._take_turn():
            return False
        self._deliver(attempts)
        return True

    def _deliver(self, attempts: list[Attempt]) -> None:
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
        """Send the remaining records of a run that has ended, and its report, best model and final state.

        Sends nothing if the run is moving, or if the driver has neither claimed nor ended the run. Raises the same
        errors as `deliver`.
        """
        attempts, status = self._read_own_attempts(), read_status(self.run)
        if not self._may_finish(attempts, status):
            self.leave()
            return
        while not self._take_turn():
            time.sleep(TURN_CHECK_S)
            self._read_own_attempts()
        if self._service is None and not self.missing():
            self._end_turn()
            return  # opening the tracking run would mark it as running again
        self._deliver(attempts)
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
        self.delivered = replace(self.delivered, ended=ended)
        self._end_turn()

    def leave(self) -> None:
        """Stop delivering. The tracking run stays open."""
        with suppress(TrackingError, StorageError):
            if self._service:
                self._service.close(None)
            self._end_turn()

    def _read_own_attempts(self) -> list[Attempt]:
        """Return the run's attempts. Raises `SupersededError` if another driver has taken over the run."""
        attempts = read_attempts(self.run)
        refuse_if_superseded(attempts, "", self._driver)
        return attempts

    def _has_claimed(self, attempts: list[Attempt]) -> bool:
        """Return True if the driver has claimed the run, or if no driver was given."""
        return bool(attempts) and self._driver in ("", attempts[-1].driver)

    def _may_finish(self, attempts: list[Attempt], status: Status | None) -> bool:
        """Return True if the driver has claimed or ended the run, and the run is not moving to another driver."""
        if self._driver and status and left_for_move(status):
            return False
        ended = bool(attempts and status and _end_of(status) and status.driver == self._driver)
        return ended or self._has_claimed(attempts)

    def _take_turn(self) -> bool:
        """Begin this driver's turn, unless an earlier driver's delivery may still send records.

        The turn begins no later than TURN_AFTER_S seconds after the claim, because the earlier delivery's process may
        be gone. Returns True if the turn has begun.
        """
        if self.delivered.driver == self._driver or not self._driver:
            return True
        stored = read_delivered(self.run, self.name)
        self._claimed = time.monotonic() if self._claimed is None else self._claimed
        if stored.driver and time.monotonic() - self._claimed < TURN_AFTER_S:
            return False
        self._record(replace(stored, driver=self._driver), arrived=True)
        return True

    def _end_turn(self) -> None:
        """Store the progress, and let another driver deliver. Do nothing if another driver's turn has begun."""
        if not self._driver or read_delivered(self.run, self.name).driver == self._driver:
            self._record(replace(self.delivered, driver=""), arrived=True)

    def missing(self) -> str:
        """Describe what has not been delivered, or return an empty string. Raises `StorageError` if storage fails."""
        spans = lineage(read_attempts(self.run))
        final = self._final_step(spans)
        steps = [record["step"] for record in iter_records(self.run, "metrics", spans) if self._is_new(record, final)]
        status = read_status(self.run)
        parts = [f"{plural(len(steps), 'record')} of steps {steps[0]} to {steps[-1]}"] if steps else []
        if spans and status and _end_of(status) not in ("", self.delivered.ended):
            parts.append("the report, the model and the final state")
        return ", ".join(parts)

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
            log.warning(f"tracking: the service rejected the parameters of attempt {newest.number}: {error}")
        self._described = newest.number

    def _final_step(self, spans: list[Span]) -> int:
        """Return the newest checkpoint's step, up to which the history is final, or -1 if there is no checkpoint."""
        counted, _, _ = classify(list_directories(self.run), spans)
        return step_of(counted[-1]) if counted else -1

    def _is_new(self, record: MetricRecord, final: int) -> bool:
        step, attempt = record["step"], record["attempt"]
        if _is_evaluation(record):
            return (self.delivered.step, self.delivered.attempt) < (step, attempt) and step <= final
        return self.delivered.step < step <= final

    def _send(self, service: Service, records: list[MetricRecord]) -> None:
        self._read_own_attempts()  # because another driver can have claimed the run since the last request
        refused = 0
        try:
            service.send([to_point(record) for record in records])
        except RefusedError as error:
            if len(records) > 1:  # find the rejected record
                for record in records:
                    self._send(service, [record])
                return
            refused = 1
            log.warning(f"tracking: the service rejected the record of step {records[0]['step']}: {error}")
        before = self.delivered
        last = records[-1]
        now = replace(
            before,
            step=last["step"],
            attempt=last["attempt"],
            records=before.records + len(records) - refused,
            refused=before.refused + refused,
        )
        self._record(now, service.acknowledges)

    def _attach_report(self, service: Service) -> None:
        content = read_if_exists(lambda: self.run.storage.read(self.run.key(FILE)))
        digest = hashlib.sha256(content or b"").hexdigest()
        if content and digest != self.delivered.report:
            file = Path(self._scratch.name, FILE)
            file.write_bytes(content)
            service.attach(file, "")
            self._read_own_attempts()  # uploads take long, and another driver may have stored its progress meanwhile
            self._record(replace(self.delivered, report=digest), service.acknowledges)

    def _attach_model(self, service: Service) -> str:
        """Deliver the best model, and return its checkpoint's name, or an empty string if there is no model."""
        try:
            best, notes = choose(self.run, "best")
            if MODEL not in best.files:  # sharded: only the last checkpoint also contains the complete model
                best, notes = choose(self.run, "newest")
            for text in notes:
                log.info(f"tracking: {text}")
            if MODEL not in best.files:
                raise NotFoundError(f"{best.name} has no {MODEL}")
            if best.name != self.delivered.model:
                service.attach(self._fetch(best), "model")
                self._read_own_attempts()
                self._record(replace(self.delivered, model=best.name), service.acknowledges)
        except (NotFoundError, DamageError) as error:
            log.warning(f"tracking: no model was delivered: {shorten(error)}")
            return ""
        return best.name

    def _fetch(self, checkpoint: Checkpoint) -> Path:
        """Return a verified local copy of a checkpoint's model. Raises `DamageError` if the model is damaged."""
        file = Path(self._scratch.name, MODEL)
        with file.open("wb") as copy:
            faults = compare_bytes(self.run, checkpoint, MODEL, copy.write)
        if faults:
            raise DamageError(f"{checkpoint.name}: {faults[0]}")
        return file

    def _summarize(self, service: Service, status: Status) -> dict[str, str]:
        """Send the goodput as a metric, so that runs can be compared. Return a tag with the number of incidents."""
        receipts = read_receipts(read_journal(self.run, "events"))
        fraction = goodput(read_attempts(self.run), receipts, status.time)
        if fraction is not None:
            service.send([Point(max(0, self.delivered.step), status.time, {"goodput": fraction})])
        return {"sunspot.incidents": str(sum(receipt.cause.incident for receipt in receipts))}

    def _record(self, delivered: Delivered, arrived: bool) -> None:
        """Update the progress, and store it in the run if the service has received the data (`arrived`).

        If this raises `StorageError`, a later delivery sends the data again.
        """
        self.delivered = delivered
        if arrived:
            self.run.storage.write(self.run.key("tracking", f"{self.name}-delivered.json"), to_json(asdict(delivered)))


def _end_of(status: Status) -> str:
    """Return a string that identifies how and when the run ended, or an empty string while it is running."""
    return f"{status.state} {status.time:.3f}" if status.state.terminal else ""


def to_point(record: MetricRecord) -> Point:
    """Return the metrics of a record.

    If the record only contains an evaluation, only the metrics of held-out rows are returned, because an earlier record
    contains the step's other metrics.
    """
    values = {
        name: float(value)
        for name, value in record.items()
        if isinstance(value, (int, float)) and name not in NO_METRICS
        if name.startswith(HELD_OUT) or not _is_evaluation(record)
    }
    return Point(record["step"], record.get("time") or 0.0, values)


def _is_evaluation(record: MetricRecord) -> bool:
    """Return True if a record only contains the evaluation of an epoch that an earlier attempt completed."""
    return record.get("steps") == 0


@dataclass(frozen=True)
class TrackingRun:
    """The tracking run to which a run is delivered, as stored in the run's `<service>.json`."""

    id: Annotated[str, MinLen(1)]


@dataclass(frozen=True)
class Delivered:
    """The progress of a delivery, as stored in the run's `<service>-delivered.json`."""

    step: Annotated[int, Ge(-1)] = -1
    "The step up to which all records have been delivered or rejected."
    attempt: Count = 0
    "The attempt of the last delivered or rejected record. A later attempt can add an evaluation of the same step."
    records: Count = 0
    "The number of records that the service has received."
    refused: Count = 0
    "The number of records that the service has rejected."
    report: str = ""
    "The SHA-256 of the delivered report."
    model: str = ""
    "The name of the checkpoint with the delivered model."
    ended: str = ""
    "The end of the run that was delivered, as returned by `_end_of`."
    driver: str = ""
    "The driver whose turn it is to deliver, or an empty string after its last delivery."


def read_tracking_run(run: Run, service: str) -> str | None:
    """Return the tracking run's ID, or None if the file with the ID is missing or damaged.

    Raises `StorageError` if storage fails.
    """
    found = _read(run, TrackingRun, f"{service}.json")
    return found.id if found else None


def claim_tracking_run(run: Run, service: str, identity: str) -> str:
    """Store `identity` as the tracking run's ID, unless an ID is stored already. Return the stored ID."""
    file, content = f"{service}.json", to_json(asdict(TrackingRun(identity)))
    if not run.storage.create(run.key("tracking", file), content):
        known = _read(run, TrackingRun, file)
        if known:
            return known.id
        run.storage.write(run.key("tracking", file), content)
    return identity


def read_delivered(run: Run, service: str) -> Delivered:
    """Return the progress of a delivery. If the progress file is damaged, the delivery starts from the beginning.

    Raises `StorageError` if storage fails.
    """
    return _read(run, Delivered, f"{service}-delivered.json") or Delivered()


def _read(run: Run, schema: type[Record], file: str) -> Record | None:
    return read_if_usable(lambda: read(run, schema, "tracking", file))
