"""scripts/serve.py: a run's model over HTTP."""

from __future__ import annotations

import asyncio
import io
import json
import socket
import urllib.error
import urllib.request
from collections import deque
from typing import Any

import pytest
import ray
from PIL import Image

from sunspot.errors import NotFoundError
from sunspot.predict.classifier import Classifier
from tests.harness.finished_run import FinishedRun


@pytest.fixture(autouse=True)
def fastapi() -> object:
    """Imported here, not at the head: it takes a second, and a collection imports every file of tests."""
    return pytest.importorskip("fastapi", reason="Ray Serve is not installed; it comes with the extra 'serve'")


def post(port: int, body: bytes) -> tuple[int, object]:
    request = urllib.request.Request(f"http://127.0.0.1:{port}/", body)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


@pytest.mark.slow
def test_a_png_gets_its_class_and_everything_ends(finished_run: FinishedRun, ray_address: str) -> None:
    from ray import serve

    from scripts.serve import serving

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    image = finished_run.rows()["image"][0]
    picture = io.BytesIO()
    Image.fromarray(image[0]).save(picture, "PNG")
    [expected], [probabilities] = Classifier("run", storage=finished_run.storage).predict(image)

    with serving("run", storage=finished_run.storage, port=port):
        status, said = post(port, picture.getvalue())
        assert (status, said) == (200, {"prediction": expected, "probabilities": probabilities.tolist()})
        status, said = post(port, b"no image")
        assert status == 400
        assert "the body: neither a PNG" in str(said)

    assert not serve.status().applications
    with pytest.raises(OSError, match="refused"):
        post(port, b"")
    with (
        pytest.raises(NotFoundError, match="no checkpoint yet"),
        serving("nothing", storage=finished_run.storage, port=port),
    ):
        pytest.fail("it serves nothing")
    assert ray.is_initialized()


def request(*chunks: bytes, pause_s: float = 0.0) -> Any:
    """A request whose body comes in chunks, and ends after the last."""
    from starlette.requests import Request

    left = deque(chunks)

    async def receive() -> dict[str, object]:
        await asyncio.sleep(pause_s)
        return {"type": "http.request", "body": left.popleft() if left else b"", "more_body": bool(left)}

    return Request({"type": "http", "method": "POST", "headers": []}, receive)


def test_a_body_has_a_size_and_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    from scripts import serve

    assert asyncio.run(serve.read_body(request(b"ab", b"", b"c"))) == b"abc"
    monkeypatch.setattr(serve, "MAX_BYTES", 10)
    with pytest.raises(serve.RefusedBody, match="more than 10 bytes") as refused:
        asyncio.run(serve.read_body(request(*[b"12345"] * 1000)))
    assert refused.value.status == 413
    monkeypatch.setattr(serve, "BODY_WITHIN_S", 0.1)
    with pytest.raises(serve.RefusedBody, match=r"bytes came in 0\.1 s") as refused:
        asyncio.run(serve.read_body(request(*[b""] * 1000, pause_s=0.02)))
    assert refused.value.status == 408
