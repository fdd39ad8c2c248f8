"""Sets up every test: a clean environment, a Hypothesis profile, and a pytest-xdist group."""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
from collections.abc import Generator, Iterator

import pytest
from hypothesis import settings

from tests.harness.logs import printed_and_kept

# Several processes share the cores. An OpenMP thread that waits for a core spins, so more threads make tests slower.
os.environ["OMP_NUM_THREADS"] = "1"

# There are no deadlines, because an example's duration depends on the machine. `make test-all` selects "thorough".
settings.register_profile("quick", deadline=None, max_examples=25)
settings.register_profile("thorough", deadline=None, max_examples=200)
settings.load_profile("quick")

# A shell that starts the tests in the background makes them, and all their child processes, ignore Ctrl-C. `nohup`
# makes them ignore SIGHUP.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

SHARED = {
    "ray_address": "ray",
    "mlflow_server": "mlflow",
    "browser": "browser",
    "groups": "ranks",  # tests/integration/test_fsdp.py
    "hugging_face_runs": "hugging face",
    "peft": "hugging face",  # tests/unit/test_finetune.py
    "keras": "keras",  # tests/unit/test_keras.py
    "session_output": "session",  # tests/integration/test_ray_session.py
    "environment": "wheel",  # tests/end_to_end/test_wheel.py
}
"""Groups of tests that share a slow fixture. One process runs all tests of a group."""

SLOW_TO_IMPORT = {"keras", "lightning", "peft", "torch._dynamo", "torch.distributed.tensor", "transformers"}
"""Packages that only a test or a fixture may import, because every pytest-xdist process imports all test modules."""

USER_VARIABLES = ("SUNSPOT_", "AWS_", "AZURE_", "GOOGLE_", "STORAGE_EMULATOR_HOST", "MLFLOW_", "WANDB_", "RAY_ADDRESS")
"""Prefixes of environment variables with the developer's settings and credentials."""

LAST_START = pytest.StashKey[float]()
"""Latest start of a slow test, on the monotonic clock."""

pytest_plugins = [
    "tests.harness.constants",
    "tests.harness.process_group",
    "tests.harness.program",
    "tests.harness.finished_run",
    "tests.harness.hugging_face",
    "tests.harness.s3",
    "tests.harness.clouds",
    "tests.harness.kubernetes",
    "tests.harness.commands",
    "tests.harness.browser",
    "tests.harness.mlflow_server",
]


@pytest.fixture(autouse=True)
def warned() -> Iterator[list[str]]:
    """Return this process's warnings since the test began."""
    with printed_and_kept() as texts:
        yield texts


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--minutes", type=float, help="skip slow tests that would begin after so many minutes")


def pytest_configure(config: pytest.Config) -> None:
    minutes = config.getoption("--minutes")
    config.stash[LAST_START] = float("inf") if minutes is None else time.monotonic() + 60 * minutes


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("slow") and time.monotonic() > item.config.stash[LAST_START]:
        pytest.skip("slow, and the time of --minutes is over")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect without the garbage collector, which would traverse all imported modules repeatedly."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Freeze the imported modules' objects, and start PyTorch's autograd engine in each process that collected tests.

    Otherwise, a garbage collection during a test would traverse all imported modules, and copy their pages in forked
    processes.

    If torch.compile runs before the first backward pass, it registers a CUDA device that does not exist. The engine
    then starts a thread for that device, and a forked process cannot run a backward pass (PyTorch 2.15).
    """
    gc.freeze()
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.ones(1, requires_grad=True).sum().backward()


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Raise an error if a test module imports a package that is slow to import."""
    before = SLOW_TO_IMPORT & sys.modules.keys()
    report = yield
    slow = SLOW_TO_IMPORT & sys.modules.keys() - before
    if slow:
        report.outcome = "failed"
        report.longrepr = f"imports {', '.join(sorted(slow))}, which takes seconds: import it in the tests that use it"
    return report


def pytest_itemcollected(item: pytest.Item) -> None:
    """Group tests by the shared fixtures that they use. Any free process runs the other tests."""
    groups = [group for name, group in SHARED.items() if name in getattr(item, "fixturenames", ())]
    if groups:
        item.add_marker(pytest.mark.xdist_group(groups[0]))


@pytest.fixture(scope="session", autouse=True)
def clean_shared_environment() -> Iterator[None]:
    """Remove the developer's variables from the environment of shared fixtures. `SHELL` still has them."""
    with pytest.MonkeyPatch.context() as patch:
        remove_user_variables(patch)
        yield


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the developer's variables, and those of earlier tests, from each test's environment."""
    remove_user_variables(monkeypatch)


def remove_user_variables(patch: pytest.MonkeyPatch) -> None:
    """Remove the developer's settings, credentials, cluster and Ray from the environment."""
    for name in list(os.environ):
        if name.startswith(USER_VARIABLES) and name != "AWS_CA_BUNDLE":
            patch.delenv(name)
    for name in ("KUBECONFIG", "AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        patch.setenv(name, os.devnull)
