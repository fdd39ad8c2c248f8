"""Delivers a run to MLflow, Weights & Biases or TensorBoard (`python -m sunspot.tracking RUN`)."""

from __future__ import annotations

import argparse
import logging
import select
import sys
import time
from contextlib import suppress

from sunspot.command_line import CommandParser
from sunspot.errors import NotFoundError, SettingsError, StorageError, SupersededError, TrackingError, run_and_exit
from sunspot.formatting import plural
from sunspot.log import print_logs
from sunspot.run import Run, open_run
from sunspot.run.attempts import read_attempts, recorded_setting
from sunspot.run.history import Journal
from sunspot.run.status import STATUS_EVERY_S, read_status
from sunspot.settings import PREFIX, Settings, load_settings
from sunspot.storage.limits import pause_after
from sunspot.tracking.delivery import Delivery
from sunspot.tracking.process import command, refuse_unusable

log = logging.getLogger("sunspot.tracking")  # `__name__` is "__main__", which is not a child of the logger `sunspot`

DESCRIPTION = """\
Deliver the rest of a run to MLflow, Weights & Biases or TensorBoard. Nothing is delivered twice.

The driver starts this program if SUNSPOT_TRACKING is set. Start it yourself to deliver the rest after an outage.
"""

END_TIMEOUT_S = 30
"""Seconds for which delivering the end of a run is retried if the service is unreachable."""


def main() -> int:
    """Deliver the run once, or keep following it until stdin is closed."""
    arguments = _parse()
    print_logs()
    settings = load_settings({"STORAGE_PATH": arguments.storage} if arguments.storage else {})
    run = open_run(settings.storage_path, arguments.run)
    if not settings.tracking:
        settings = _recorded_service(run, settings)
    refuse_unusable(settings)
    delivery = Delivery(run, settings.tracking, settings.tracking_project, arguments.follow or "")
    if arguments.follow is not None:
        follow(delivery, min(settings.report_every_s, STATUS_EVERY_S), command(run, settings))
        return 0
    if not read_attempts(run):
        raise NotFoundError(f"{run.location}: the run does not exist, or none of its workers have started")
    delivery.finish()
    sent = delivery.delivered
    print(f"tracking: {sent.records} records delivered, {sent.refused} rejected{_at(delivery)}")
    return 0


def follow(delivery: Delivery, every_s: float, later: str) -> None:
    """Deliver new records until stdin is closed, then deliver the rest.

    Messages about failures include the command `later`, which delivers the remaining records.
    """
    outage = Outage(delivery)
    try:
        _follow(delivery, outage, every_s)
        _finish(delivery, outage, later)
    except SupersededError as error:
        log.info(f"tracking: another process now owns the run and will deliver the remaining records ({error})")
        delivery.leave()


def _follow(delivery: Delivery, outage: Outage, every_s: float) -> None:
    delivered: object = None
    pause = 0.0
    while not select.select([sys.stdin], [], [], pause)[0]:
        pause = every_s
        try:
            status = read_status(delivery.run)
            newest = status and (status.attempt, status.checkpoint, outage.tries)
            if newest != delivered and delivery.deliver():
                delivered = status and (status.attempt, status.checkpoint, 0)
                outage.end()
        except TrackingError as error:
            pause = pause_after(outage.tries)
            outage.add_failure(error)
        except StorageError:
            continue  # the run itself reports storage errors


def _finish(delivery: Delivery, outage: Outage, later: str) -> None:
    deadline = time.monotonic() + END_TIMEOUT_S
    tries = 0
    while True:
        try:
            delivery.finish()
            outage.end()
            if delivery.place:
                lost = f", {delivery.delivered.refused} rejected" if delivery.delivered.refused else ""
                log.info(f"tracking: {delivery.delivered.records} records delivered{lost}{_at(delivery)}")
            return
        except (TrackingError, StorageError) as error:
            if isinstance(error, TrackingError):
                outage.add_failure(error)
            if time.monotonic() >= deadline:
                missing = _missing(delivery)
                log.warning(f"tracking: could not deliver {missing}: {error}; run {later} to deliver the rest")
                return
        time.sleep(min(pause_after(tries), max(0.0, deadline - time.monotonic())))
        tries += 1


class Outage:
    """Reports when a service outage begins and ends, on the terminal and in the run's events."""

    def __init__(self, delivery: Delivery) -> None:
        self._delivery = delivery
        self.tries = 0
        "The number of consecutive failed attempts."
        self._since = 0.0

    def add_failure(self, error: TrackingError) -> None:
        """Count a failed attempt. The first failure begins the outage."""
        self.tries += 1
        if self.tries == 1:
            self._since = time.time()
            self._record("tracking behind", f"since step {max(0, self._delivery.delivered.step)}: {error}")

    def end(self) -> None:
        """Report that the outage has ended, if there was one. Call this after a successful attempt."""
        if self.tries:
            attempts = plural(self.tries, "failed attempt")
            self._record("tracking goes on", f"after {time.time() - self._since:.0f} s and {attempts}")
            self.tries = 0

    def _record(self, what: str, detail: str) -> None:
        log.info(f"tracking: {what}: {detail}")
        journal = Journal(self._delivery.run, "events", self._delivery.attempt)
        journal.note(what, max(0, self._delivery.delivered.step), detail)
        with suppress(StorageError):  # it is also in the driver's output
            journal.flush()


def _recorded_service(run: Run, settings: Settings) -> Settings:
    """Return the settings with TRACKING set to the service that the run's last attempt used."""
    attempts = read_attempts(run)
    service, project = (recorded_setting(attempts, name) for name in ("tracking", "tracking_project"))
    if attempts and not service:
        raise SettingsError(f"{run.location} was not tracked; set {PREFIX}TRACKING to mlflow, wandb or tensorboard")
    return settings.model_copy(update={"tracking": service, "tracking_project": project})


def _missing(delivery: Delivery) -> str:
    try:
        return delivery.missing() or "the end of the run"
    except StorageError:
        return "an unknown part, because storage failed"


def _at(delivery: Delivery) -> str:
    return f": {delivery.place}" if delivery.place else ""


def _parse() -> argparse.Namespace:
    parser = CommandParser(
        "python -m sunspot.tracking", DESCRIPTION, ("storage_path", "tracking", "tracking_project", "report_every_s")
    )
    parser.add_argument("run", metavar="RUN", help="a run's name")
    parser.add_argument("--storage", help="storage path of the runs (default: SUNSPOT_STORAGE_PATH)")
    parser.add_argument(
        "--follow",
        metavar="DRIVER",
        nargs="?",
        const="",
        help="deliver new records until stdin is closed, or until another driver takes over the run from DRIVER",
    )
    return parser.parse_args()


if __name__ == "__main__":
    run_and_exit(main)
