"""What the tags of a RayJob's images mean now: asked of their registries, without credentials, and only by `submit`.

A tag that is pushed anew while a run is on would mix two programs, once a node comes that has not pulled it yet. The
name of a RayJob is that of what was given: with its tag, so that it stays the same when that was pushed anew.
"""

import json
import re
from collections.abc import Mapping
from functools import partial
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlencode
from urllib.request import Request, urlopen

from sunspot.background import start_thread
from sunspot.errors import shorten
from sunspot.submitter.manifest.pods import pod_groups, ray_container
from sunspot.submitter.manifest.render import has_registry

ANSWERS_WITHIN_S = 5.0  # with the token that a registry may want: a submission goes on without it

KINDS = (
    "application/vnd.oci.image.index.v1+json, application/vnd.docker.distribution.manifest.list.v2+json, "
    "application/vnd.oci.image.manifest.v1+json, application/vnd.docker.distribution.manifest.v2+json"
)
"""All architectures first, as nodes may have several; the others are for images of one."""


def pin_images(manifest: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the RayJob with the images of its Ray containers by digest, and a line for each tag that was asked for."""
    pinned = json.loads(json.dumps(manifest))
    containers = [ray_container(group) for group in pod_groups(pinned["spec"]).values()]
    pulled = dict.fromkeys(each["image"] for each in containers if each.get("imagePullPolicy") != "Never")
    tags = [image for image in pulled if has_registry(image) and "@" not in image]
    answers = {image: start_thread(partial(ask_digest, image), "registry") for image in tags}
    said, by_digest = [], {}
    for image, answer in answers.items():
        try:
            digest = answer.result(ANSWERS_WITHIN_S)
            by_digest[image] = f"{_split(image)[0]}@{digest}"
            said.append(f"image {image}: {digest}")
        except (OSError, HTTPException, ValueError, AttributeError) as error:
            said.append(f"image {image}: by its tag, because its registry does not give the digest: {_explain(error)}")
    for each in containers:
        each["image"] = by_digest.get(each["image"], each["image"])
    return pinned, said


def _explain(error: Exception) -> str:
    """Return why a registry did not answer, without the names of Python's classes."""
    reason = getattr(error, "reason", None)  # a URLError wraps the error of the socket
    cause = reason if isinstance(reason, Exception) else error
    if isinstance(cause, TimeoutError):
        return f"no answer within {ANSWERS_WITHIN_S:.0f} s"
    return getattr(cause, "strerror", None) or shorten(cause)


def ask_digest(image: str) -> str:
    """Ask a registry which digest the tag of a reference has; raises `OSError`, `HTTPException` or `ValueError`."""
    name, tag = _split(image)
    host, _, path = name.partition("/")
    if host == "docker.io":  # which is no registry itself
        host, path = "registry-1.docker.io", path if "/" in path else f"library/{path}"
    scheme = "http" if host.partition(":")[0] in ("localhost", "127.0.0.1") else "https"
    request = Request(f"{scheme}://{host}/v2/{path}/manifests/{tag}", headers={"Accept": KINDS}, method="HEAD")
    try:
        answer = urlopen(request, timeout=ANSWERS_WITHIN_S)
    except HTTPError as error:
        wanted = dict(re.findall(r'(\w+)="([^"]*)"', error.headers.get("WWW-Authenticate", "")))
        if error.code != 401 or not wanted.get("realm", "").startswith(f"{scheme}://"):
            raise
        query = urlencode({"service": wanted.get("service", ""), "scope": f"repository:{path}:pull"})
        with urlopen(f"{wanted['realm']}?{query}", timeout=ANSWERS_WITHIN_S) as granted:
            token = json.loads(granted.read(1_000_000))
        request.add_unredirected_header("Authorization", f"Bearer {token.get('token') or token.get('access_token')}")
        answer = urlopen(request, timeout=ANSWERS_WITHIN_S)
    with answer:
        digest = str(answer.headers.get("Docker-Content-Digest"))
    if not re.fullmatch("sha256:[0-9a-f]{64}", digest):
        raise ValueError(f"its answer has no digest ({digest})")
    return digest


def _split(image: str) -> tuple[str, str]:
    """Split a reference into the image's name, with the registry, and the tag."""
    place, slash, name = image.rpartition("/")
    name, _, tag = name.partition(":")
    return f"{place}{slash}{name}", tag or "latest"
