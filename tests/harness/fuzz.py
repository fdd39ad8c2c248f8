"""Makes damaged and hostile inputs, and checks that each is promptly accepted or rejected with a safe message."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from sunspot.errors import SunspotError

Result = TypeVar("Result")

COMMANDS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
"""Characters that must never reach a terminal."""

LONGEST_MESSAGE = 20_000


class HangError(BaseException):
    """The time limit has passed. `except Exception` does not catch this error."""


def effort(times: int) -> Callable[[Any], Any]:
    """Return Hypothesis settings with `times` as many examples as the profile sets."""
    checks = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]
    return settings(max_examples=settings.default.max_examples * times, suppress_health_check=checks)


def ends_well(act: Callable[[], Result], limit_s: float = 20.0) -> Result | None:
    """Return the result of `act`, or None if it raises a `SunspotError` with a message that is safe for a terminal."""

    def give_up(number: int, frame: FrameType | None) -> None:
        raise HangError(f"not done after {limit_s} s")

    began = time.monotonic()
    before, (left, _) = signal.signal(signal.SIGALRM, give_up), signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        return act()
    except SunspotError as error:
        message = str(error)
        assert message
        assert not COMMANDS.search(message)
        assert len(message) < LONGEST_MESSAGE
        return None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if left:  # restore the test's time limit
            signal.setitimer(signal.ITIMER_REAL, max(0.01, left - (time.monotonic() - began)))


@st.composite
def damaged(draw: st.DrawFn, originals: list[bytes]) -> bytes:
    """Return one of the `originals` with a few changes to its bits, bytes and lengths, and with parts moved."""
    content = bytearray(draw(st.sampled_from(originals)))
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, max(0, len(content) - 1)))
        match draw(st.sampled_from(["bit", "bytes", "cut", "insert", "repeat", "number"])):
            case "bit" if content:
                content[place] ^= 1 << draw(st.integers(0, 7))
            case "bytes":
                new = draw(st.binary(max_size=8))
                content[place : place + len(new)] = new
            case "cut":
                del content[place : place + draw(st.integers(1, 1 + len(content)))]
            case "insert":
                content[place:place] = draw(st.binary(max_size=20))
            case "repeat":
                end = place + draw(st.integers(1, 100))
                content[place:place] = content[place:end] * draw(st.integers(1, 5))
            case "number":
                number = draw(st.sampled_from([0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1]))
                size = draw(st.sampled_from([4, 8]))
                order = draw(st.sampled_from(["big", "little"]))
                content[place : place + size] = (number % 2 ** (8 * size)).to_bytes(size, order)
    return bytes(content)
