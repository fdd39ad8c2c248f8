"""Renders the shipped profiles' manifests, and builds kustomizations."""

import re
import subprocess
from pathlib import Path
from typing import Any

import yaml

from sunspot.submitter.manifest.profile import load_profile
from sunspot.submitter.manifest.render import JobRequest, Rendered
from sunspot.submitter.manifest.render import render as render_as_given

STORAGE_PATH, IMAGE = "s3://bucket/runs", "registry.example/sunspot:1"

OF_THE_IMAGE = {"kubernetes.io/arch": "amd64"}
"""Labels of the nodes that run the image, because `make image` builds it for their architecture."""

ON_A_CLOUD = ("--storage", STORAGE_PATH, "--image", IMAGE)


def render(profile: str, overrides: dict[str, str], **options: Any) -> Rendered:
    """Render a manifest like `sunspot` does, with a bucket and an image if the profile requires them."""
    chosen = load_profile(profile, {})
    if chosen.cloud and "STORAGE_PATH" not in (chosen.settings or {}):
        overrides = {"STORAGE_PATH": STORAGE_PATH, **overrides}
    if chosen.cloud and not chosen.image:
        options = {"image": IMAGE, **options}
    return render_as_given(JobRequest(profile, overrides, **options))


def in_pods(profile: str, pods: str) -> dict[str, str]:
    """Return NUM_WORKERS for this number of training pods, such as 2 or 1..2."""
    [machine] = load_profile(profile, {}).groups
    return {"NUM_WORKERS": re.sub(r"\d+", lambda number: str(int(number[0]) * max(1, machine.gpus or 0)), pods)}


def build(folder: Path) -> list[dict[str, Any]]:
    """Return the objects that `kubectl apply -k` applies."""
    built = subprocess.run(["kubectl", "kustomize", str(folder)], capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return list(yaml.safe_load_all(built.stdout))
