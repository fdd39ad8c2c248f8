"""How many pods of each kind a job may have, and what they cost per hour."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sunspot.settings import HEAD, PREFIX
from sunspot.submitter.manifest.pods import group_name
from sunspot.submitter.manifest.profile import Head, Profile

PRICES = PREFIX + "PRICES"


@dataclass(frozen=True)
class PodPrice:
    """The pods of the head or of a group."""

    name: str
    least: int
    most: int
    price: float | None
    "Of a pod, per hour; None: not known."


def find_prices(profile: Profile) -> dict[str, dict[str, float]]:
    """Return the prices that a profile names, as the setting PRICES has them: for the head, and by group."""
    groups = {group_name(number): group for number, group in enumerate(profile.groups)}
    machines = {HEAD: profile.head or Head(), **groups}
    keys = {"price", "on_demand_price"}
    found = {name: machine.model_dump(include=keys, exclude_none=True) for name, machine in machines.items()}
    return {name: each for name, each in found.items() if each}


def pod_prices(manifest: Mapping[str, Any], settings: Mapping[str, str]) -> list[PodPrice]:
    """List what a rendered job may have at most; nothing for one in a cluster that is there. `settings` are its own."""
    cluster = manifest["spec"].get("rayClusterSpec")
    if not cluster:
        return []
    prices = json.loads(settings.get(PRICES) or "{}")
    counts = {HEAD: (1, 1)}
    for group in cluster["workerGroupSpecs"]:
        counts[group["groupName"]] = (group["minReplicas"], group["maxReplicas"])
    return [PodPrice(name, *count, prices.get(name, {}).get("price")) for name, count in counts.items()]
