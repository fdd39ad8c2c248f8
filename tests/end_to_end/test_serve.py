"""Tests of the server in docs/predict.md, which serves a run's model over HTTP."""

from __future__ import annotations

import io
import json
import urllib.request
from types import ModuleType

import pytest
from PIL import Image

from scripts.object_stores import free_port
from sunspot.predict.classifier import Classifier
from tests.harness.documentation import find_example
from tests.harness.finished_run import SETTINGS_OF_RUN, FinishedRun


@pytest.mark.slow
def test_the_server_classifies_a_png(finished_run: FinishedRun, ray_address: str) -> None:
    pytest.importorskip("fastapi", reason="Ray Serve is not installed; it comes with the extra 'serve'")
    from ray import serve

    from sunspot.ray_session import ray_session

    image = finished_run.rows()["image"][0]
    picture = io.BytesIO()
    Image.fromarray(image[0]).save(picture, "PNG")
    task = SETTINGS_OF_RUN["TASK"]
    classes, probabilities = Classifier("run", storage=finished_run.storage, task=task).predict(image)
    example = ModuleType("my_server")
    exec(find_example("python", "# my_server.py"), vars(example))
    port = free_port()
    with ray_session():
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        try:
            serve.run(example.Server.bind("run", finished_run.storage, task))
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/", picture.getvalue(), timeout=60) as answer:
                said = json.load(answer)
        finally:
            serve.shutdown()
    assert said == {"classes": classes.tolist(), "probabilities": probabilities.tolist()}
