"""Defines the variables that a job's manifest sets in its pods. Users do not set them.

The variables have the same prefix as the settings, and are checked and recorded together with the settings.
"""

import json
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer

from sunspot.settings.fields import DUMPED, PARSED, parse_json, setting

PART_OF_SETTINGS = ConfigDict(frozen=True, extra="forbid", defer_build=True)
"""Configuration of models that are validated within `Settings`, which would otherwise be compiled twice (10 ms)."""


class NodeGroup(BaseModel):
    """A group of identical nodes. Each node has a Ray resource with the group's name."""

    model_config = PART_OF_SETTINGS

    name: str
    most: int = Field(ge=1)
    "Maximum number of training workers on the group's nodes."
    after_s: float = Field(ge=0)
    """Seconds for which the earlier groups must lack nodes before this group is used. Once the earlier groups have had
    enough nodes for as long, this group is no longer used. Repeated losses prolong this wait (elastic.groups)."""


HEAD = "head"
"""Key of the head's node in the prices."""


class NodePrice(BaseModel):
    """A node's price per hour."""

    model_config = PART_OF_SETTINGS

    price: float | None = Field(None, ge=0, allow_inf_nan=False)
    on_demand_price: float | None = Field(None, ge=0, allow_inf_nan=False)


NodePrices = Annotated[dict[str, NodePrice], PARSED, DUMPED]

NodeGroups = Annotated[
    tuple[NodeGroup, ...],
    BeforeValidator(lambda value: parse_json(value) if isinstance(value, str) else value),
    PlainSerializer(lambda groups: json.dumps([dict(group) for group in groups]) if groups else "", return_type=str),
]


class JobContext(BaseModel):
    """The job that a run trains in. The default values are for a run that a user started without a job."""

    model_config = PART_OF_SETTINGS

    notice_s: int = setting(0, "whole seconds, at least 0", ge=0)
    "Seconds from a preemption notice to the end of the node, or 0 if unknown."
    prices: NodePrices = setting({}, """a JSON object, e.g. {"workers": {"price": 1.2, "on_demand_price": 3.9}}""")
    "Hourly price of the head, and of a node in each group."
    node_groups: NodeGroups = setting((), """a JSON list, e.g. [{"name": "workers", "most": 8, "after_s": 0}]""")
    "Node groups, if there are several, in order of preference."
    nodes_timeout_s: float = setting(1800, "seconds above 0", gt=0, allow_inf_nan=False)
    "Seconds to wait for the first of several node groups."
    code: str = setting("", "nothing: `sunspot submit --code FOLDER` sets it", pattern=r"^(.+@sha256:[0-9a-f]{64})?$")
    "URL of the archive of your own code, with its SHA-256."
    moves_from: str = setting("", "nothing: `sunspot move` sets it")
    "Owner whose driver must save and stop before this job claims the run, or empty."
    job_id: str = setting("", "the identity of the cluster job, or empty")
    "Identity of the job, which is the same for every retry."
