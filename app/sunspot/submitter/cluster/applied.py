"""Stores the manifest that `sunspot submit` applied, and the request it was rendered from, in a RayJob's annotations.

`sunspot wait` and `sunspot resume` restart a RayJob from this manifest. Annotations are more trustworthy than objects
in storage, because only users who can run pods in the namespace can write them. The RayJob's own spec cannot be used,
because Kueue changes it.

`sunspot wait --profile` renders the request again for another place. The request only contains options and settings, so
all other parts of the new RayJob come from the profile.
"""

import json
from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter

from sunspot.code_archive import CODE
from sunspot.errors import ClusterError
from sunspot.run.owner import new_submission
from sunspot.submitter.cluster.views import JobView
from sunspot.submitter.manifest.pods import RUN_LABEL, set_variable
from sunspot.submitter.manifest.render import JOB_ID, SEARCH, JobRequest, Rendered, settings_of

APPLIED = "sunspot/applied"
"""The name of the annotation with the manifest."""

REQUEST = "sunspot/request"
"""The name of the annotation with the request."""


def as_submission(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return a rendered RayJob with a new owner ID (JOB_ID), and with its own manifest in an annotation."""
    submitted: dict[str, Any] = json.loads(json.dumps(manifest))
    job_id = settings_of(submitted).get(JOB_ID) or submitted["metadata"]["name"]
    set_variable(submitted, JOB_ID, new_submission(job_id))
    return _annotated(submitted)


def applied_manifest(job: JobView, run: str) -> dict[str, Any] | None:
    """Return the manifest that `sunspot submit` applied as this RayJob, or None if another tool applied it.

    Raises `ClusterError` if the annotation does not contain this RayJob's manifest.
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
        as_submission(manifest)  # raises if a required part is missing
        if found != expected:
            raise ValueError(f"{found} instead of {expected}")
        return _annotated(manifest)
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError) as error:
        fault = f"does not contain its own manifest in its annotation {APPLIED}"
        raise ClusterError(f"RayJob {job.name} {fault}; submit the run again") from error


def with_request(rendered: Rendered) -> dict[str, Any]:
    """Return a rendered RayJob, with its request in an annotation if the request can be rendered for another place.

    The annotation omits the profile, the place and the namespace. A packed folder is replaced by its archive's URL.
    """
    manifest, request = rendered.manifest, rendered.request
    if not request.place or request.cluster or manifest["spec"]["entrypoint"] == SEARCH:
        return manifest
    options = {name: getattr(request, name) for name in ("image", "queue", "generation")}
    code = settings_of(manifest).get(CODE)
    text = json.dumps({**options, "code": code, "settings": request.all_settings()})
    metadata = manifest["metadata"]
    return {**manifest, "metadata": {**metadata, "annotations": {**metadata["annotations"], REQUEST: text}}}


def read_request(job: JobView, profile: str) -> JobRequest | None:
    """Return the request in a RayJob's annotation, with `profile` as its profile and without a place.

    Returns None if the RayJob has no such annotation, or is managed by a GitOps tool. Raises `ClusterError` if the
    annotation cannot be used.
    """
    text = (job.raw["metadata"].get("annotations") or {}).get(REQUEST)
    if text is None or job.gitops_tool:
        return None
    try:
        given = json.loads(text)
        options = {name: given[name] for name in ("image", "queue", "generation", "code", "settings")}
        content = json.dumps({**options, "profile": profile})
        return TypeAdapter(JobRequest).validate_json(content, strict=True)
    except (ValueError, KeyError, TypeError, RecursionError) as error:  # pydantic's error is a ValueError
        fault = f"RayJob {job.name} does not contain a usable request in its annotation {REQUEST}"
        raise ClusterError(f"{fault}; to move the run by hand, use `sunspot move`") from error


def without_copy(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return a manifest without the annotation that contains its copy."""
    metadata = manifest["metadata"]
    others = {name: text for name, text in (metadata.get("annotations") or {}).items() if name != APPLIED}
    return {**manifest, "metadata": {**metadata, "annotations": others}}


def _annotated(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return a manifest with a copy of itself in an annotation."""
    content = without_copy(manifest)
    annotations = {**content["metadata"]["annotations"], APPLIED: json.dumps(content)}
    return {**content, "metadata": {**content["metadata"], "annotations": annotations}}
