"""`python -m scripts.serve RUN`: a run's newest model over HTTP, with Ray Serve. An example to start from.

    curl --data-binary @digit.png http://127.0.0.1:8000/
    {"prediction": 7, "probabilities": [...]}

The body is a PNG, a JPEG, or an .npy array: one image or a batch. Needs the extra `serve`.
"""

from __future__ import annotations

import argparse
import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ray import serve
from starlette.requests import Request
from starlette.responses import JSONResponse

from sunspot.data.images import decode_images
from sunspot.errors import SunspotError, run_and_exit
from sunspot.predict.actor import absolute_path, wants_gpu
from sunspot.predict.classifier import Classifier, open_checkpoint
from sunspot.ray_session import ray_session
from sunspot.settings import load_settings

MAX_BYTES = 16 << 20
"""Of one body."""

BODY_WITHIN_S, ANSWER_WITHIN_S = 30.0, 120.0
"""For a body to arrive, and for the whole of a request."""


@serve.deployment
class Model:
    """One replica: a verified checkpoint behind HTTP."""

    def __init__(self, run: str, checkpoint: str, storage: str) -> None:
        self._classifier = Classifier(run, checkpoint, storage)

    async def __call__(self, request: Request) -> JSONResponse:
        """Class and probabilities of the image in the body; 400, 408 or 413 and one sentence if it is none."""
        try:
            content = await read_body(request)
            result = await asyncio.to_thread(self._predict, content)
        except SunspotError as error:
            return JSONResponse({"error": str(error)}, status_code=400)
        except RefusedBody as refusal:
            return JSONResponse({"error": str(refusal)}, status_code=refusal.status)
        return JSONResponse(result)

    def _predict(self, content: bytes) -> Any:
        images = decode_images(content, self._classifier.shape, "the body")
        predictions, probabilities = self._classifier.predict(images)
        results = [
            {"prediction": int(prediction), "probabilities": row.tolist()}
            for prediction, row in zip(predictions, probabilities, strict=True)
        ]
        return results if len(results) > 1 else results[0]


class RefusedBody(Exception):
    """A body that is not read to its end."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


async def read_body(request: Request) -> bytes:
    """The body of a request; raises `RefusedBody` for one above MAX_BYTES, or not there after BODY_WITHIN_S."""
    content = bytearray()
    try:
        async with asyncio.timeout(BODY_WITHIN_S):
            async for chunk in request.stream():
                content += chunk
                if len(content) > MAX_BYTES:
                    raise RefusedBody(413, f"the body: more than {MAX_BYTES} bytes; send fewer images at a time")
    except TimeoutError:
        raise RefusedBody(408, f"the body: {len(content)} bytes came in {BODY_WITHIN_S:g} s, and no end") from None
    return bytes(content)


@contextmanager
def serving(run: str, checkpoint: str = "newest", storage: str = "runs", port: int = 8000) -> Iterator[None]:
    """Serve the model on this machine's loopback address while the context lasts.

    Raises what `open_checkpoint` raises: Serve itself gives no reason why a replica cannot start.
    """
    run, checkpoint, storage = absolute_path(run), absolute_path(checkpoint), absolute_path(storage, name=False)
    open_checkpoint(run, checkpoint, storage)
    with ray_session():
        gpus = float(wants_gpu(load_settings().use_gpu))
        model = Model.options(ray_actor_options={"num_gpus": gpus})  # type: ignore[attr-defined]
        serve.start(http_options={"host": "127.0.0.1", "port": port, "request_timeout_s": ANSWER_WITHIN_S})
        try:
            serve.run(model.bind(run, checkpoint, storage))
            yield
        finally:
            serve.shutdown()


def main() -> int:
    """Serve until Ctrl-C."""
    parser = argparse.ArgumentParser(prog="python -m scripts.serve", description="A run's model over HTTP.")
    parser.add_argument("run", metavar="RUN", help="a run's name, or the path or URL of a checkpoint directory")
    parser.add_argument("--checkpoint", default="newest", help="newest (default), best, a name, or a directory's path")
    parser.add_argument("--storage", help="where runs are kept (default: SUNSPOT_STORAGE_PATH)")
    parser.add_argument("--port", type=int, default=8000)
    arguments = parser.parse_args()
    storage = arguments.storage or load_settings().storage_path
    with serving(arguments.run, arguments.checkpoint, storage, arguments.port):
        print(f"http://127.0.0.1:{arguments.port}/ answers; Ctrl-C ends it", flush=True)
        threading.Event().wait()
    return 0


if __name__ == "__main__":
    run_and_exit(main)
