"""A run: submit it, follow it, read what it has written, predict with its model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sunspot.errors import SettingsError
from sunspot.run import Run as StoredRun
from sunspot.run.logs import read_stream
from sunspot.submitter.cluster.completion import wait_for_end
from sunspot.submitter.cluster.observation import reach_run
from sunspot.submitter.cluster.progress_lines import print_state, print_submission, show_progress
from sunspot.submitter.cluster.run_record import gather, summarize
from sunspot.submitter.cluster.start import render_for_cluster
from sunspot.submitter.cluster.start import submit as start_rendered
from sunspot.submitter.cluster.stopping import stop_run
from sunspot.submitter.manifest.render import JobRequest, with_place
from sunspot.submitter.metric_tables import to_table, with_ranks
from sunspot.submitter.printing import warn
from sunspot.submitter.runs import Target, find_run, find_stream

if TYPE_CHECKING:
    import numpy as np
    import pyarrow

    from sunspot.predict.classifier import Images


def submit(
    name: str,
    profile: str = "kind",
    settings: Mapping[str, Any] | None = None,
    *,
    image: str | None = None,
    storage: str | None = None,
    context: str | None = None,
    namespace: str | None = None,
) -> Run:
    """Have the cluster train the run, after the checks of `sunspot submit`, and return at once.

    Settings have their names with or without the prefix; numbers, booleans and dictionaries need no quotes. A live run
    with the same ones is attached to, a finished one stays finished. Raises `SettingsError`, `ClusterError`,
    `StorageError`, or `ConflictError` for a run that is live with others; then nothing was changed.
    """
    texts = {setting: _to_text(setting, value) for setting, value in (settings or {}).items()}
    request = JobRequest(profile, with_place(texts, name, storage), image, namespace)
    rendered, cluster = render_for_cluster(request, context)
    print_submission(start_rendered(cluster, rendered), as_json=False)
    return Run(rendered.settings.run_name, rendered.settings.storage_path, context, rendered.namespace)


def _to_text(name: str, value: Any) -> str:
    try:
        return value if isinstance(value, str) else json.dumps(value)
    except TypeError as error:
        raise SettingsError(f"{name}={value!r}: give text, a number, a boolean, or what JSON can hold") from error


class Run:
    """A run by its name, in `storage`, or else where its RayJob keeps it, or SUNSPOT_STORAGE_PATH says.

    Every method looks anew. All raise `NotFoundError` when there is no such run, and `StorageError`.
    """

    def __init__(
        self, name: str, storage: str | None = None, context: str | None = None, namespace: str | None = None
    ) -> None:
        self._target = Target(name, storage, context, namespace)

    def __repr__(self) -> str:
        return f"Run({self._target.run!r}, storage={self._target.storage!r})"

    def status(self) -> dict[str, Any]:
        """Say where it stands, by cluster and storage or the one that answers: what `sunspot status --json` prints."""
        access = reach_run(self._target)
        record = summarize(access, *gather(access))
        return {**record, "state": record["state"].value}

    def wait(self, timeout: float | None = None) -> str:
        """Print its progress until it ends, and return how: "succeeded" or "stopped".

        Raises `SunspotError` when it failed or is lost, `ClusterError`, and `GaveUpError` after `timeout` seconds; the
        run goes on.
        """
        access = reach_run(self._target)
        return wait_for_end(access, timeout, show_progress(access.run)).value

    def stop(self, timeout: float = 600) -> None:
        """Have it save and end, and remove its cluster; `submit` lets it go on.

        Raises `GaveUpError` when it has not ended after `timeout` seconds.
        """
        access = reach_run(self._target)
        print_state(access.run, *stop_run(access, timeout), as_json=False)

    def metrics(self) -> pyarrow.Table:
        """Read the metric history, oldest first, with the numbers of each rank (`ranks`) as lists of structs.

        `.to_pandas()` makes it a DataFrame.
        """
        return to_table(with_ranks(self._stored()))

    def logs(self, rank: int | None = None, previous: bool = False) -> str:
        """Read what the driver, or a worker by its rank, has printed; with `previous`, the start before the newest."""
        run = self._stored()
        return read_stream(run, find_stream(run, rank, previous)).decode(errors="replace")

    def predict(self, images: Images, checkpoint: str = "newest") -> tuple[np.ndarray, np.ndarray]:
        """Predict here the class of each image, int64 [B], and the probabilities of all, float32 [B, classes].

        Images are uint8 [C, H, W] or [B, C, H, W], or names of files; a checkpoint is newest, best or a name. Raises
        `SettingsError` for images that the model does not take, and `DamageError`. Needs sunspot-train[train].
        """
        run = self._stored()
        try:
            from sunspot.predict.classifier import Classifier
        except ModuleNotFoundError as error:
            raise SettingsError(
                f"predict: {error.name} is not installed; pip install 'sunspot-train[train]'"
            ) from error
        model = Classifier(run.name, checkpoint, run.storage.locate(""))
        for text in model.warnings:
            warn(f"warning: {text}")
        return model.predict(images)

    def _stored(self) -> StoredRun:
        """Find its place in storage."""
        run = reach_run(self._target).run
        return find_run(run.name, run.storage.locate(""))
