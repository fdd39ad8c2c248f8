"""Two processes take one run over from each other while every request to its bucket is late."""

import os

import pytest

from tests.harness.takeovers import SUPERSEDED, fight


@pytest.mark.slow
def test_takeovers_lose_no_base_and_no_row(s3_bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", os.environ["AWS_ENDPOINT_URL"])  # `fight` changes it
    found = fight(f"s3://{s3_bucket}/team", seconds=60, takeovers=8, delay_s=0.5)
    assert set(found["exit codes"]) <= {0, SUPERSEDED}
    assert found["damaged"] == found["skipped"] == found["impossible rows"] == []
    assert all(missing == repeated == 0 for _, missing, repeated in found["rows"])
    assert found["same weights"]
