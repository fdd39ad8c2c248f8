"""Parses and formats Kubernetes quantities, such as 250m or 5Gi, without importing the Kubernetes client."""

import math
from typing import Any

UNITS = {"n": 1e-9, "u": 1e-6, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
UNITS |= {f"{prefix}i": 1024.0**power for power, prefix in enumerate("KMGTPE", 1)}


def parse_quantity(quantity: Any) -> float:
    """Return a quantity in base units, such as CPUs or bytes."""
    number = str(quantity).rstrip("numkMGTPEKi")
    return float(number) * UNITS.get(str(quantity).removeprefix(number), 1.0)


def format_quantity(amount: float, of_cpus: bool = False) -> str:
    """Format a number of bytes in Gi or Mi, or a number of CPUs as whole CPUs or in thousandths (m).

    Rounds up to the next whole unit.
    """
    small = (1e-3, "m") if of_cpus else (2.0**20, "Mi")
    large = (1.0, "") if of_cpus else (2.0**30, "Gi")
    size, unit = large if amount % large[0] == 0 else small
    return f"{math.ceil(round(amount / size, 3))}{unit}"


def format_like(amount: float, pattern: Any) -> str:
    """Format an amount in the same unit as `pattern`, such as 11.5Gi if the pattern is 4Gi."""
    text = str(pattern)
    unit = text.removeprefix(text.rstrip("numkMGTPEKi"))
    return f"{round(amount / UNITS.get(unit, 1.0), 3):.15g}{unit}"
