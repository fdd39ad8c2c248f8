"""Parses DATASET as a mixture: several sources with weights, such as `a:0.7,b:0.3`.

The source of each row depends only on the weights and on the row's position in the run, so a mixture needs no record of
its own in a checkpoint.
"""

import json
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from fractions import Fraction
from math import gcd, lcm
from typing import Any, NamedTuple, TypeVar

from sunspot.errors import SettingsError

WEIGHTED = re.compile(r"(.*\S)\s*:\s*([0-9]+(?:\.[0-9]+)?|\.[0-9]+)")
"""Pattern for a source and its weight, which follows the last colon because URLs contain colons, too."""

MAX_CYCLE = 1 << 31
"""Limit on the sum of a mixture's whole weights. A product of two numbers below it fits in int64."""

Number = TypeVar("Number", bound=Any)


class WeightedSource(NamedTuple):
    """A source of a mixture."""

    location: str
    "The value of DATASET for this source alone."
    given: str
    "The weight as it was given."
    weight: int
    "The weight as a whole number. The weights of a mixture have no common divisor."


def parse_mixture(dataset: str) -> tuple[WeightedSource, ...]:
    """Return the sources of a mixture, or an empty tuple if DATASET is a single dataset.

    Raises `SettingsError` if DATASET looks like a mixture, but is not a valid one.
    """
    parts = [part.strip() for part in dataset.split(",")]
    matches = [WEIGHTED.fullmatch(part) for part in parts]
    if len(parts) == 1 or not (any(matches) or any("://" in part for part in parts[1:])):
        return ()
    found: dict[str, str] = {}
    for part, match in zip(parts, matches, strict=True):
        if not match or not Fraction(match[2]):
            raise SettingsError(
                f"the source {part!r} of the mixture has no weight above 0 after its last colon; use the form "
                "SOURCE:WEIGHT,SOURCE:WEIGHT, such as a:0.7,b:0.3 (if this is a single path, rename it without commas)"
            )
        if match[1] in found:
            raise SettingsError(f"the mixture contains {match[1]} twice; list it once, with the sum of its weights")
        found[match[1]] = match[2]
    weights = [Fraction(weight) for weight in found.values()]
    scale = Fraction(lcm(*(each.denominator for each in weights)), gcd(*(each.numerator for each in weights)))
    whole = [int(weight * scale) for weight in weights]
    if sum(whole) >= MAX_CYCLE:
        raise SettingsError(f"the weights {', '.join(found.values())} have too many digits; round them to six decimals")
    return tuple(WeightedSource(*each, weight) for each, weight in zip(found.items(), whole, strict=True))


def find_locations(dataset: str) -> list[str]:
    """Return the locations in DATASET: each source of a mixture, or the single dataset."""
    return [source.location for source in parse_mixture(dataset)] or [dataset]


def map_locations(dataset: str, change: Callable[[str], str]) -> str:
    """Return DATASET with each location replaced by the result of `change`."""
    sources = parse_mixture(dataset)
    return ",".join(f"{change(each.location)}:{each.given}" for each in sources) if sources else change(dataset)


def check_dataset(value: Any) -> Any:
    """Normalize DATASET: join a list from `sunspot.toml` into text, and remove spaces between a mixture's sources.

    Raises `ValueError` if the mixture is invalid.
    """
    if not isinstance(value, str):
        return value
    if value.startswith("["):
        with suppress(ValueError, TypeError):  # otherwise, it is a path
            value = ",".join(json.loads(value))
    try:
        return map_locations(value, str)
    except SettingsError as error:
        raise ValueError(str(error)) from None


def count_by_source(weights: Sequence[int], rows: Number) -> list[Number]:
    """Return how many of a mixture's first `rows` rows come from each source. `rows` can be an array of int64.

    The first source takes its share of the rows, rounded down, and the others share the remaining rows in the same way.
    If `rows` grows by one, exactly one count grows, so each row comes from exactly one source. Each count differs from
    its exact share by less than the number of sources. The sequence of sources repeats after `sum(weights)` rows.
    """
    total = sum(weights)
    cycles = rows // total
    left = rows % total
    counts = []
    for weight in weights:
        taken = left * weight // total
        counts.append(cycles * weight + taken)
        left = left - taken
        total -= weight
    return counts
