# SPDX-License-Identifier: Apache-2.0
"""`mlflow`: a run of MLflow, by its client: no active run, no other global state."""

import time
from collections.abc import Mapping

from accelfn.base.calling import called
from accelfn.track.packages import package
from accelfn.track.tracker import IMAGES, Tracker, open_tracker
from accelfn.track.values import Pixels, Plain, flat
from accelfn.world import World

_AT_ONCE = 100  # MLflow refuses more parameters in one call


class _MLflow:
    def __init__(
        self, experiment: str, store: str | None, name: str | None, run_id: str | None
    ) -> None:
        package("mlflow", extra="mlflow")
        self._entities = package("mlflow.entities", extra="mlflow")
        client = package("mlflow.tracking", extra="mlflow").MlflowClient(store)
        if run_id is None:
            found = client.get_experiment_by_name(experiment)
            key = found.experiment_id if found else client.create_experiment(experiment)
            run_id = client.create_run(key, run_name=name).info.run_id
        else:
            client.update_run(run_id, status="RUNNING")
        self.backend, self._run = (client, run_id), run_id
        self._client = client

    def metrics(self, metrics: Mapping[str, float], step: int) -> None:
        now, kind = int(time.time() * 1000), self._entities.Metric
        told = [kind(name, value, now, step) for name, value in metrics.items()]
        for start in range(0, len(told), _AT_ONCE):
            self._client.log_batch(self._run, metrics=told[start : start + _AT_ONCE])

    def hyperparameters(self, hyperparameters: Mapping[str, Plain]) -> None:
        kind = self._entities.Param
        told = [kind(name, str(value)) for name, value in flat(hyperparameters).items()]
        for start in range(0, len(told), _AT_ONCE):
            self._client.log_batch(self._run, params=told[start : start + _AT_ONCE])

    def images(self, images: Mapping[str, Pixels], step: int) -> None:
        for name, image in images.items():
            self._client.log_image(self._run, image, key=name, step=step)

    def close(self, *, failed: bool) -> None:
        self._client.set_terminated(self._run, "FAILED" if failed else "FINISHED")


@called
def mlflow(
    experiment: str,
    *,
    world: World,
    store: str | None = None,
    name: str | None = None,
    run_id: str | None = None,
) -> Tracker:
    """Return a tracker that is a run of MLflow; `accelfn[mlflow]`.

    A parameter is written once: MLflow refuses another value for it. Of
    a run that goes back to an earlier step it keeps both branches.

    Args:
        experiment: its name there; it is made if there is none. A `run_id` has its own.
        world: that of the run; rank 0 tracks.
        store: the URI of a server, or of a database such as `sqlite:///runs.db`; else what
            MLflow's settings say.
        name: of the run; MLflow invents one.
        run_id: of a run that is gone on with. `backends["mlflow"]` is the client and this id.

    Raises:
        TrackingError: the package is missing, or the run could not be opened.
    """
    return open_tracker(
        "mlflow",
        lambda: _MLflow(experiment, store, name, run_id),
        world=world,
        accepts=(IMAGES,),
    )
