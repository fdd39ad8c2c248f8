"""Whatever is damaged, every verb and every reader ends with a result or one clear error: no trace, no hang, no lie."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from tests.harness.damage import KINDS, VERBS, Bench

THOROUGH = settings().max_examples > 100
INPUTS = 500 if THOROUGH else 25
VERBS_AT_ONCE = len(VERBS) if THOROUGH else 3


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("damage"))


def test_the_whole_run_is_read_without_a_fault(bench: Bench) -> None:
    bench.restore()
    assert None not in bench.facts.values()
    bench.examine("run.json", bench.keys("run.json")[0])


@pytest.mark.timeout(3600)
@settings(max_examples=INPUTS, suppress_health_check=list(HealthCheck))
@given(kind=st.sampled_from(list(KINDS)), data=st.data())
def test_a_damaged_object_ends_in_a_result_or_one_clear_error(bench: Bench, kind: str, data: st.DataObject) -> None:
    key, content = bench.damage(kind, data.draw)
    note(f"{key} is {content[:1000]!r}")
    verbs = data.draw(st.sets(st.sampled_from(VERBS), min_size=VERBS_AT_ONCE, max_size=VERBS_AT_ONCE))
    bench.examine(kind, key, sorted(verbs, key=VERBS.index))
