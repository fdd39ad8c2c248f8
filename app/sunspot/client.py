"""A run: train it here or submit it, follow it, read what it has written, predict with its model, delete it."""

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
from sunspot.run.overview import read_view
from sunspot.settings import load_settings, setting_text, with_place
from sunspot.submitter.checkpoint_list import list_checkpoints
from sunspot.submitter.cluster.api import try_connect
from sunspot.submitter.cluster.deletion import delete_run, find_contents
from sunspot.submitter.cluster.observation import reach_run
from sunspot.submitter.cluster.progress_lines import ProgressLines, print_pods, print_state, print_submission
from sunspot.submitter.cluster.records import describe_runs, make_record, read_run
from sunspot.submitter.cluster.start import render_for_cluster, resume_run
from sunspot.submitter.cluster.start import submit as start_rendered
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
    """Train the run on this machine from where it stands, as `python -m sunspot.train` does, and return when it ends.

    Settings as for `submit`, above those of the environment. A session of Ray that is open is used. Raises what ended
    the run, and `SettingsError` where the extra `train` is not installed.
    """
    wanted = load_settings(with_place(_to_texts(settings), name, storage))
    with _of_the_extra_train("train"):
        import torch  # noqa: F401  # which `train_run` would miss in the middle

        from sunspot.tracking.process import refuse_unusable
        from sunspot.train.driver import train_run
    refuse_unusable(wanted)
    train_run(wanted)
    return Run(wanted.run_name, wanted.storage_path, task=wanted.task)


def list_runs(
    storage: str | None = None, context: str | None = None, namespace: str | None = None
) -> list[dict[str, Any]]:
    """List every run of a storage, the one modified last first: what `sunspot list --json` prints."""
    cluster, _ = try_connect(context, namespace)
    return describe_runs(find_storage(storage), cluster=cluster)[0]


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
    """Have the cluster train the run, after the checks of `sunspot submit`, and return at once.

    Settings have their names with or without the prefix; numbers, booleans and dictionaries need no quotes. `code` is
    the folder of your own code, which is uploaded. If the run is live with the same settings, this attaches to it; a
    finished run stays finished. `take_over` takes over a run that is alive elsewhere, such as in another cluster.
    Raises `SettingsError`, `ClusterError`, `StorageError`, or `ConflictError` for a run that is live with other
    settings or elsewhere. An error leaves everything as it was.
    """
    request = JobRequest(profile, with_place(_to_texts(settings), name, storage), image, namespace, code=code)
    rendered, cluster = render_for_cluster(request, context)
    print_pods(rendered.pods)
    print_submission(start_rendered(cluster, rendered, take_over=take_over), as_json=False)
    submitted = rendered.settings
    return Run(submitted.run_name, submitted.storage_path, context, rendered.namespace, submitted.task)


def _to_texts(settings: Mapping[str, Any] | None) -> dict[str, str]:
    return {setting: setting_text(setting, value) for setting, value in (settings or {}).items()}


@contextmanager
def _of_the_extra_train(what: str) -> Iterator[None]:
    """Say what to install when an import of the context fails."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise SettingsError(f"{what}: {error.name} is not installed; {how_to_install('train')}") from error


class Run:
    """A run by its name, in `storage`, or else where SUNSPOT_STORAGE_PATH says.

    Without either, the run is read from the bucket that its RayJob names, but `stop`, `resume` and `delete` refuse.
    Every method reads the run again. All raise `NotFoundError` when there is no such run, and `StorageError`.
    """

    def __init__(
        self,
        name: str,
        storage: str | None = None,
        context: str | None = None,
        namespace: str | None = None,
        task: str = "",
    ) -> None:
        """`task` is the module of your own that the run trains, if any; `predict` imports it.

        `train` and `submit` return runs that know their task. Without `task`, SUNSPOT_TASK or sunspot.toml names it.
        """
        self._task = task
        self._target = Target(name, storage, context, namespace)

    def __repr__(self) -> str:
        return f"Run({self._target.run!r}, storage={self._target.storage!r})"

    def status(self) -> dict[str, Any]:
        """Say where it stands, by cluster and storage or the one that answers: what `sunspot status --json` prints."""
        access = reach_run(self._target)
        record = make_record(access, *read_run(access))
        return {**record, "state": record["state"].value}

    def wait(self, timeout: float | None = None) -> str:
        """Print its progress until it ends, and return how: "succeeded" or "stopped".

        Raises `SunspotError` when it failed or is lost, `ClusterError`, and `GaveUpError` after `timeout` seconds; the
        run goes on.
        """
        access = reach_run(self._target)
        return wait_for_end(access, timeout, ProgressLines(access.run)).value

    def stop(self, timeout: float = 600) -> None:
        """Have it save and end, and remove its cluster; `submit` lets it go on.

        Raises `GaveUpError` when it has not ended after `timeout` seconds.
        """
        access = reach_run(self._target, changed_by="stop")
        print_state(access.run, *stop_run(access, timeout), as_json=False)

    def resume(self) -> None:
        """Let a stopped run go on: one that was submitted starts again, one that trained here may `train` again."""
        access = reach_run(self._target, changed_by="resume")
        if submission := resume_run(access, access.observe_existing()):
            print_submission(submission, as_json=False)

    def delete(self) -> None:
        """Remove it from the cluster and from storage, for ever and without asking.

        Raises `ConflictError` while it is live, and `GaveUpError` when its pods do not go.
        """
        access = reach_run(self._target, changed_by="delete")
        delete_run(access.run, find_contents(access).snapshot.cluster.jobs, access.cluster)

    def cost(self) -> dict[str, Any]:
        """Say what its nodes cost so far: `cost` of `status`."""
        view = read_view(self._stored())
        return view.spending.record(view.step)

    def doctor(self) -> dict[str, Any]:
        """Find out why it is pending, slow, stuck or failed: what `sunspot doctor --json` prints."""
        return examine(reach_run(self._target)).record()

    def metrics(self) -> pyarrow.Table:
        """Read the metric history, oldest first, with the numbers of each rank (`ranks`) as lists of structs.

        `.to_pandas()` makes it a DataFrame where pandas is installed, which the extra `train` brings; `.to_pylist()` a
        list of dictionaries anywhere.
        """
        return to_table(with_ranks(self._stored()))

    def events(self) -> list[dict[str, Any]]:
        """Read what happened to it besides training, and each start of its workers, by time."""
        return read_events(self._stored())

    def checkpoints(self) -> list[dict[str, Any]]:
        """List its checkpoints by step, each verified: what `sunspot checkpoints ls --json` prints."""
        return list_checkpoints(self._stored()).records()

    def audit(self) -> list[dict[str, int]]:
        """Count the rows that each epoch consumed, missed and repeated.

        Raises `DamageError` for a fault, and `NotFoundError` when SUNSPOT_AUDIT was not set.
        """
        run = self._stored()
        proof = prove(run)
        conclude(run, proof)
        if not proof.epochs:
            raise NotFoundError(f"{run.location}: {NO_ROWS}")
        return [epoch.record() for epoch in proof.epochs]

    def report(self, path: str | None = None) -> Path:
        """Write its report, one HTML file, to `path` or RUN-report.html; returns where that is."""
        run = self._stored()
        return write_file(path or f"{run.name}-report.html", render_stored(run), mark=POLICY.encode())

    def logs(self, rank: int | None = None, previous: bool = False) -> str:
        """Read what the driver, or a worker by its rank, has printed; with `previous`, the start before the newest."""
        run = self._stored()
        return read_stream(run, find_stream(run, rank, previous)).decode(errors="replace")

    def predict(self, images: Images, checkpoint: str = "newest") -> tuple[np.ndarray, np.ndarray]:
        """Predict here the class of each image, int64 [B], and the probabilities of all, float32 [B, classes].

        Images are uint8 [C, H, W] or [B, C, H, W], or names of files; a checkpoint is newest, best or a name. Raises
        `SettingsError` for images that the model does not take and for a task that is neither Sunspot's nor your own,
        and `DamageError`. Needs sunspot-train[train].
        """
        run = self._stored()
        with _of_the_extra_train("predict"):
            from sunspot.predict.classifier import Classifier
        model = Classifier(run.name, checkpoint, run.storage.locate(""), task=self._task)
        for text in model.warnings:
            warn(f"warning: {text}")
        return model.predict(images)

    def _stored(self) -> StoredRun:
        """Find its place in storage."""
        run = reach_run(self._target).run
        return find_run(run.name, run.storage.locate(""))
