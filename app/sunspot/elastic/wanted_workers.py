"""Tracks the number of workers that a run should have: NUM_WORKERS, unless a user has reduced it (`sunspot scale`).

A separate thread reads the user's request from storage, because storage that hangs must not delay a preemption notice.
If storage does not answer, the last known request stays in force.
"""

from sunspot.run import Run
from sunspot.run.requests import ScaleRequest, narrowed, read_scale
from sunspot.settings import WorkerRange

SCALE_CHECK_EVERY_S = 2.0
"""Seconds between two reads of the request. Each read is one small request to storage."""


class WantedWorkers:
    """The number of workers that a run should have, which a user can change while the run trains."""

    def __init__(self, run: Run, given: WorkerRange) -> None:
        """Start without a user's request. `given` is the setting NUM_WORKERS."""
        self._run, self._given = run, given
        self._request: ScaleRequest | None = None

    def read(self) -> None:
        """Read the user's request. Raises `StorageError`."""
        self._request = read_scale(self._run)

    @property
    def range(self) -> WorkerRange:
        """The number of workers that the run should have now."""
        return narrowed(self._given, self._request)

    @property
    def narrowed(self) -> bool:
        """True if a user has asked for fewer workers than NUM_WORKERS allows."""
        return self.range != self._given

    def describe(self) -> str:
        """Return the reason for the current number of workers, as text that begins with `because`."""
        if self._request and self.narrowed:
            return f"because {self._request.by or 'a user'} asked for {self.range} (`sunspot scale`)"
        return f"because SUNSPOT_NUM_WORKERS={self._given}"
