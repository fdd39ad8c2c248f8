"""The Python API. Use it to train or submit a run, follow it, read its files, predict with its model, and delete it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sunspot.errors import NotFoundError, SettingsError
from sunspot.extras import how_to_install
from sunspot.report.page import POLICY
from sunspot.report.search import render_stored
from sunspot.run import Run as StoredRun
from sunspot.run.history import read_events
from sunspot.run.logs import read_stream
from sunspot.run.seen import look, read_details
from sunspot.settings import load_settings, setting_text, with_place
from sunspot.submitter.checkpoint_list import list_checkpoints
from sunspot.submitter.cluster.api import try_connect
from sunspot.submitter.cluster.deletion import delete_run, find_contents
from sunspot.submitter.cluster.observation import reach_run
from sunspot.submitter.cluster.placing import render_in_place, submit_in_place
from sunspot.submitter.cluster.progress_lines import ProgressLines, print_pods, print_state, print_submission
from sunspot.submitter.cluster.records import describe_runs, make_status_record, read_run
from sunspot.submitter.cluster.start import resume_run
from sunspot.submitter.cluster.stopping import stop_run
from sunspot.submitter.cluster.waiting import wait_for_end
from sunspot.submitter.doctor.diagnose import examine
from sunspot.submitter.manifest.render import JobRequest
from sunspot.submitter.metric_tables import to_table, with_ranks
from sunspot.submitter.printing import warn, write_file
from sunspot.submitter.proof import NO_ROWS, conclude, prove
from sunspot.submitter.runs import Target, find_run, find_storage, find_stream

if TYPE_CHECKING:
    import numpy as np
    import pyarrow

    from sunspot.predict.classifier import Images


def train(name: str, settings: Mapping[str, Any] | None = None, *, storage: str | None = None) -> Run:
    """Train the run on this machine from its newest state, like `python -m sunspot.train`, and return when it ends.

    `settings` have the same form as in `submit`, and take precedence over the environment. If a Ray session is open, it
    is used. Raises the error that ended the run, or `SettingsError` if the extra `train` is not installed.
    """
    wanted = load_settings(with_place(_to_texts(settings), name, storage))
    with _extra_required("train"):
        import torch  # noqa: F401  # otherwise `train_run` would fail later

        from sunspot.tracking.process import refuse_unusable
        from sunspot.train.driver import train_run
    refuse_unusable(wanted)
    train_run(wanted)
    return Run(wanted.run_name, wanted.storage_path, task=wanted.task)


def list_runs(
    storage: str | None = None, context: str | None = None, namespace: str | None = None
) -> list[dict[str, Any]]:
    """Return all runs in a storage location, most recently updated first, in the format of `sunspot list --json`."""
    cluster, _ = try_connect(context, namespace)
    return [record.document() for record in describe_runs(find_storage(storage), cluster=cluster)[0]]


def submit(
    name: str,
    profile: str = "kind",
    settings: Mapping[str, Any] | None = None,
    *,
    image: str | None = None,
    code: str | None = None,
    storage: str | None = None,
    context: str | None = None,
    namespace: str | None = None,
    take_over: bool = False,
) -> Run:
    """Start the run on the cluster, after the checks of `sunspot submit`, and return without waiting for it.

    Names in `settings` can have the prefix SUNSPOT_. Values are strings, numbers, booleans or dictionaries. `code` is
    the folder of your own code, which is uploaded. If the run is already live with the same settings, a `Run` for the
    live run is returned. A finished run is not started again. `take_over` allows taking over a run that is live
    elsewhere, for example in another cluster.

    Raises `ConflictError` if the run is live with other settings or elsewhere, and `SettingsError`, `ClusterError` or
    `StorageError` for other problems. If a check fails, no RayJob is created. However, if the run was last submitted to
    another place of the profile and its driver is not alive, its RayJob in that place may already have been deleted.
    """
    request = JobRequest(profile, with_place(_to_texts(settings), name, storage), image, namespace, code=code)
    rendered, cluster = render_in_place(request, context)
    print_pods(rendered.pods)
    print_submission(submit_in_place(cluster, rendered, take_over=take_over), as_json=False)
    submitted = rendered.settings
    return Run(submitted.run_name, submitted.storage_path, cluster.context, rendered.namespace, submitted.task)


def _to_texts(settings: Mapping[str, Any] | None) -> dict[str, str]:
    return {setting: setting_text(setting, value) for setting, value in (settings or {}).items()}


@contextmanager
def _extra_required(what: str) -> Iterator[None]:
    """Context manager that raises `SettingsError` for a failed import, and says how to install the extra `train`."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise SettingsError(f"{what}: {error.name} is not installed; {how_to_install('train')}") from error


class Run:
    """A run, identified by its name and its storage location, which defaults to SUNSPOT_STORAGE_PATH.

    If no storage location is set, the run is read from the bucket that its RayJob names, but `stop`, `resume` and
    `delete` raise an error. Every method reads the run again. All methods raise `NotFoundError` if the run does not
    exist. Methods that need storage raise `StorageError` if storage cannot be reached.
    """

    def __init__(
        self,
        name: str,
        storage: str | None = None,
        context: str | None = None,
        namespace: str | None = None,
        task: str = "",
    ) -> None:
        """Identify the run. `task` is used only by `predict`, and needed only if the task is your own module.

        The default is the task in SUNSPOT_TASK or sunspot.toml. Runs returned by `train` and `submit` know their task.
        """
        self._task = task
        self._target = Target(name, storage, context, namespace)

    def __repr__(self) -> str:
        return f"Run({self._target.run!r}, storage={self._target.storage!r})"

    def status(self) -> dict[str, Any]:
        """Return the run's status from the cluster and storage, in the format of `sunspot status --json`.

        If the cluster or storage cannot be reached, the status is based on the other.
        """
        access = reach_run(self._target)
        return make_status_record(access, *read_run(access)).document()

    def wait(self, timeout: float | None = None) -> str:
        """Print the run's progress until it ends, and return its final state, "succeeded" or "stopped".

        Raises `SunspotError` if the run failed or is lost, and `ClusterError` if the cluster cannot be reached. Raises
        `GaveUpError` after `timeout` seconds; the run itself continues.
        """
        access = reach_run(self._target)
        return wait_for_end(access, timeout, ProgressLines(access.run)).value

    def stop(self, timeout: float = 600) -> None:
        """Stop the run after it has saved its state, and remove its Ray cluster.

        `resume` or `submit` continues the run. Raises `GaveUpError` if the run has not ended after `timeout` seconds.
        """
        access = reach_run(self._target, changed_by="stop")
        print_state(access.run, *stop_run(access, timeout), as_json=False)

    def resume(self) -> None:
        """Allow a stopped run to continue.

        A submitted run starts again. To continue a run on this machine, call `train` afterwards.
        """
        access = reach_run(self._target, changed_by="resume")
        submission = resume_run(access, access.observe_existing())
        if submission:
            print_submission(submission, as_json=False)

    def delete(self) -> None:
        """Delete the run from the cluster and from storage, permanently and without confirmation.

        Raises `ConflictError` if the run is live, and `GaveUpError` if its pods do not stop.
        """
        access = reach_run(self._target, changed_by="delete")
        delete_run(access.run, find_contents(access).snapshot.cluster.jobs, access.cluster)

    def cost(self) -> dict[str, Any]:
        """Return the cost of the run's nodes so far, in the same format as `cost` in the result of `status`."""
        seen = read_details(look(self._stored()))
        return seen.spending.record(seen.step)

    def doctor(self) -> dict[str, Any]:
        """Return why the run is pending, slow, stuck or failed, in the format of `sunspot doctor --json`."""
        return examine(reach_run(self._target)).record()

    def metrics(self) -> pyarrow.Table:
        """Return the metric history, oldest record first. The column `ranks` has each rank's numbers.

        `.to_pylist()` turns it into a list of dictionaries. `.to_pandas()` turns it into a DataFrame if pandas is
        installed, for example with the extra `train`.
        """
        return to_table(with_ranks(self._stored()))

    def events(self) -> list[dict[str, Any]]:
        """Return the run's events, such as incidents and worker starts, oldest first."""
        return read_events(self._stored())

    def checkpoints(self) -> list[dict[str, Any]]:
        """Verify the run's checkpoints.

        Returns the checkpoints sorted by step, in the format of `sunspot checkpoints ls --json`.
        """
        return list_checkpoints(self._stored()).records()

    def audit(self) -> list[dict[str, int | str]]:
        """Return how many rows each epoch consumed, missed and repeated.

        In a mixture, rows are counted for each pass through a `source` instead of each epoch. Raises `DamageError` if
        the audit finds a fault, and `NotFoundError` if SUNSPOT_AUDIT was not set.
        """
        run = self._stored()
        proof = prove(run)
        conclude(run, proof)
        if not proof.epochs:
            raise NotFoundError(f"{run.location}: {NO_ROWS}")
        return [epoch.record() for epoch in proof.epochs]

    def report(self, path: str | None = None) -> Path:
        """Write the run's report as an HTML file to `path` (default: RUN-report.html), and return the path."""
        run = self._stored()
        return write_file(path or f"{run.name}-report.html", render_stored(run), mark=POLICY.encode())

    def logs(self, rank: int | None = None, previous: bool = False) -> str:
        """Return the output of the driver, or of the worker at `rank`.

        With `previous`, return the output from before the last restart.
        """
        run = self._stored()
        return read_stream(run, find_stream(run, rank, previous)).decode(errors="replace")

    def predict(self, images: Images, checkpoint: str = "newest") -> tuple[np.ndarray, np.ndarray]:
        """Classify images on this machine. Return their classes (int64 [B]) and probabilities (float32 [B, classes]).

        `images` are uint8 [C, H, W] or [B, C, H, W], or file names. `checkpoint` is "newest", "best" or a name.
        Requires sunspot-train[train].

        Raises `SettingsError` if the model does not accept the images, or if the run's task is not one of Sunspot's own
        tasks and is not named by `Run(task=...)`, SUNSPOT_TASK or sunspot.toml. Raises `DamageError` if the checkpoint
        is damaged.
        """
        run = self._stored()
        with _extra_required("predict"):
            from sunspot.predict.classifier import Classifier
        model = Classifier(run.name, checkpoint, run.storage.locate(""), task=self._task)
        for text in model.warnings:
            warn(f"warning: {text}")
        return model.predict(images)

    def _stored(self) -> StoredRun:
        run = reach_run(self._target).run
        return find_run(run.name, run.storage.locate(""))
