"""Keeps the manifest that `sunspot submit` applied in an annotation of the RayJob.

`sunspot wait` and `sunspot resume` start a RayJob again from this annotation. It was written by somebody who may run
pods in the namespace, while an object in storage may come from somebody who may not. They do not use the RayJob's own
spec, because Kueue changes that.
"""

import json
from collections.abc import Mapping
from typing import Any

from sunspot.errors import ClusterError
from sunspot.run.owner import new_submission
from sunspot.submitter.cluster.views import JobView
from sunspot.submitter.manifest.pods import RUN_LABEL, set_variable
from sunspot.submitter.manifest.render import JOB_ID, settings_of

APPLIED = "sunspot/applied"
"""Name of the annotation."""


def as_submission(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return a rendered RayJob as a new submission, which is a new owner, with the manifest in its annotation."""
    submitted: dict[str, Any] = json.loads(json.dumps(manifest))
    set_variable(submitted, JOB_ID, new_submission(submitted["metadata"]["name"]))
    return _annotated(submitted)


def applied_manifest(job: JobView, run: str) -> dict[str, Any] | None:
    """Return the manifest that `sunspot submit` applied as this RayJob of a run; None if something else applied it.

    Raises `ClusterError` if the annotation holds anything but the manifest of this RayJob.
    """
    metadata = job.raw["metadata"]
    text = (metadata.get("annotations") or {}).get(APPLIED)
    if text is None:
        return None
    expected = ["ray.io/v1", "RayJob", job.name, metadata.get("namespace"), run, settings_of(job.raw).get(JOB_ID)]
    try:
        manifest: dict[str, Any] = json.loads(text)
        about = manifest["metadata"]
        found = [manifest["apiVersion"], manifest["kind"], about["name"], about["namespace"]]
        found += [about["labels"][RUN_LABEL], settings_of(manifest).get(JOB_ID)]
        as_submission(manifest)  # raises if the manifest lacks a part that is needed
        if found != expected:
            raise ValueError(f"{found} instead of {expected}")
        return _annotated(manifest)
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError) as error:
        fault = f"its annotation {APPLIED} is not its own manifest"
        raise ClusterError(f"RayJob {job.name}: {fault}; submit the run again") from error


def without_copy(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return a manifest without the annotation that holds a copy of it."""
    metadata = manifest["metadata"]
    others = {name: text for name, text in (metadata.get("annotations") or {}).items() if name != APPLIED}
    return {**manifest, "metadata": {**metadata, "annotations": others}}


def _annotated(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return a manifest with a copy of itself in its annotation."""
    content = without_copy(manifest)
    annotations = {**content["metadata"]["annotations"], APPLIED: json.dumps(content)}
    return {**content, "metadata": {**content["metadata"], "annotations": annotations}}
