"""`sunspot submit` of an image named by a tag, with a registry on this machine: what the pods are told to pull."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import gaierror
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import parse_qs, urlsplit

import pytest

from sunspot.run import open_run
from sunspot.submitter.cluster.applied import applied_manifest
from sunspot.submitter.cluster.image_digests import pin_images
from sunspot.submitter.cluster.views import job_view
from sunspot.submitter.manifest.pods import pod_groups, ray_container
from tests.harness import commands
from tests.harness.kubernetes import FakeCluster
from tests.harness.manifests import render

INDEX = "application/vnd.oci.image.index.v1+json"


class Registry(ThreadingHTTPServer):
    """Knows one image, team/sunspot, and what its tags mean."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.tags = {"1": "sha256:" + "a" * 64}
        self.wants_token, self.is_private = False, False
        self.asked: list[str] = []
        self.answers = threading.Event()
        self.answers.set()

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.server_address[1]}"

    @property
    def image(self) -> str:
        return f"{self.host}/team/sunspot:1"


class _Handler(BaseHTTPRequestHandler):
    server: Registry

    def do_HEAD(self) -> None:
        self.server.asked.append(self.path)
        self.server.answers.wait(60)
        *_, tag = self.path.split("/")
        if (self.server.wants_token or self.server.is_private) and self.headers["Authorization"] != "Bearer for-all":
            realm = (
                f'Bearer realm="http://{self.server.host}/token",service="here",scope="repository:team/sunspot:pull"'
            )
            return self._answer(401, **{"WWW-Authenticate": realm})
        if self.path != f"/v2/team/sunspot/manifests/{tag}" or tag not in self.server.tags:
            return self._answer(404)
        kind = INDEX if INDEX in self.headers["Accept"] else "application/vnd.docker.distribution.manifest.v1+json"
        digest = self.server.tags[tag] if kind == INDEX else "sha256:" + "0" * 64
        return self._answer(200, **{"Docker-Content-Digest": digest, "Content-Type": kind})

    def do_GET(self) -> None:
        address = urlsplit(self.path)
        wanted = {"service": ["here"], "scope": ["repository:team/sunspot:pull"]}
        if self.server.is_private or (address.path, parse_qs(address.query)) != ("/token", wanted):
            return self._answer(403)
        self._answer(200)
        self.wfile.write(json.dumps({"token": "for-all"}).encode())
        return None

    def _answer(self, status: int, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, *words: Any) -> None:
        pass


@pytest.fixture
def registry() -> Iterator[Registry]:
    with Registry() as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.answers.set()
        server.shutdown()


@pytest.fixture
def sunspot(s3_bucket: str, capsys: pytest.CaptureFixture[str]) -> commands.Command:
    return commands.Command(open_run(f"s3://{s3_bucket}/runs", "run"), capsys)


def images(manifest: dict[str, Any]) -> set[str]:
    return {ray_container(group)["image"] for group in pod_groups(manifest["spec"]).values()}


def test_pods_pull_what_the_tag_meant_when_the_run_was_submitted(
    cluster: FakeCluster, sunspot: commands.Command, registry: Registry
) -> None:
    assert sunspot("submit", "--run", "run", "--image", registry.image) == 0, sunspot.err
    [job] = cluster.jobs.values()
    assert images(job) == {f"{registry.host}/team/sunspot@{registry.tags['1']}"}
    assert f"image {registry.image}: {registry.tags['1']}" in sunspot.err
    assert "is named by a tag" not in sunspot.err
    again = applied_manifest(job_view(job), "run")
    assert images(again) == images(job), "a restart and `resume` pull the same"


def test_a_tag_that_has_moved_makes_it_no_other_job(
    cluster: FakeCluster, sunspot: commands.Command, registry: Registry
) -> None:
    sunspot("submit", "--run", "run", "--image", registry.image)
    [(name, job)] = cluster.jobs.items()
    before = images(job)
    cluster.set_status(name, "Running", "RUNNING")
    registry.tags["1"] = "sha256:" + "b" * 64
    assert sunspot("submit", "--run", "run", "--image", registry.image, "--json") == 0, sunspot.err
    assert (sunspot.json["action"], sunspot.json["job"]) == ("attached", name)
    assert images(cluster.jobs[name]) == before
    sunspot("render", "--run", "run", "--image", registry.image)
    assert name in sunspot.out
    assert len(registry.asked) == 2, "render asks nobody"


def test_a_public_image_whose_registry_wants_a_token_is_found(registry: Registry) -> None:
    registry.wants_token = True
    pinned, _ = pin_images(render("kind", {}, image=registry.image).manifest)
    assert images(pinned) == {f"{registry.host}/team/sunspot@{registry.tags['1']}"}


@pytest.mark.parametrize("fault", ["private", "no such tag", "no digest", "silent"])
def test_a_registry_that_does_not_tell_leaves_the_tag_and_is_named(
    registry: Registry, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sunspot.submitter.cluster.image_digests.ANSWERS_WITHIN_S", 0.5)
    registry.is_private = fault == "private"
    registry.tags = {"no such tag": {}, "no digest": {"1": "sha256:1"}}.get(fault, registry.tags)
    if fault == "silent":
        registry.answers.clear()
    pinned, [said] = pin_images(render("kind", {}, image=registry.image).manifest)
    assert images(pinned) == {registry.image}
    assert said.startswith(f"image {registry.image}: by its tag, because its registry does not give the digest: ")


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (URLError(gaierror(-2, "Name or service not known")), "Name or service not known"),
        (URLError(ConnectionRefusedError(111, "Connection refused")), "Connection refused"),
        (URLError(TimeoutError("timed out")), "no answer within 5 s"),
        (HTTPError("http://here", 404, "Not Found", Message(), None), "HTTP Error 404: Not Found"),
    ],
)
def test_why_a_registry_does_not_answer_is_told_without_classes(
    error: Exception, told: str, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(image: str) -> str:
        raise error

    monkeypatch.setattr("sunspot.submitter.cluster.image_digests.ask_digest", fail)
    _, [said] = pin_images(render("kind", {}, image=registry.image).manifest)
    assert said.endswith(f": by its tag, because its registry does not give the digest: {told}")


@pytest.mark.parametrize("image", ["sunspot:1", "{host}/team/sunspot@sha256:" + "c" * 64])
def test_an_image_of_this_machine_or_with_a_digest_is_not_asked_for(registry: Registry, image: str) -> None:
    manifest = render("kind", {}, image=image.format(host=registry.host)).manifest
    assert pin_images(manifest) == (manifest, [])
    assert registry.asked == []
