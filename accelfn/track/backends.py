# SPDX-License-Identifier: Apache-2.0
"""Trackers for TensorBoard, Weights & Biases, Comet and MLflow."""

import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from accelfn import World
from accelfn.errors import TrackingError
from accelfn.track.tracker import (
    IMAGES,
    Pixels,
    Plain,
    Tracker,
    check_step,
    custom,
    flat,
    package,
    picture,
)

_FLUSH_SECONDS = 10


class _TensorBoard:
    def __init__(self, directory: str | Path, step: int | None) -> None:
        package("tensorboard", extra="tensorboard")
        self._torch = package("torch.utils.tensorboard", extra="tensorboard")
        self.backend = self._torch.SummaryWriter(
            str(Path(directory)),
            purge_step=None if step is None else step + 1,
            flush_secs=_FLUSH_SECONDS,
        )
        self._last = 0

    def metrics(self, metrics: Mapping[str, float], step: int) -> None:
        self._reach(step)
        for name, value in metrics.items():
            self.backend.add_scalar(name, value, step)

    def hyperparameters(self, hyperparameters: Mapping[str, Plain]) -> None:
        table: dict[str, Any] = flat(hyperparameters)
        for record in self._torch.summary.hparams(table, {}):
            self.backend.file_writer.add_summary(record)

    def images(self, images: Mapping[str, Pixels], step: int) -> None:
        self._reach(step)
        for name, image in images.items():
            self.backend.add_image(name, image, step, dataformats="HWC")

    def _reach(self, step: int) -> None:
        """If the run went back to an earlier step, make TensorBoard drop later steps."""
        if step < self._last:
            event = package("tensorboard.compat.proto.event_pb2", extra="tensorboard")
            log = event.SessionLog(status=event.SessionLog.START)
            start = event.Event(step=step, session_log=log)
            self.backend.file_writer.add_event(start, step)
        self._last = step

    def close(self, *, failed: bool) -> None:
        self.backend.close()


def tensorboard(
    directory: str | Path, *, world: World, step: int | None = None
) -> Tracker:
    """Create a tracker that writes TensorBoard's event files; install `accelfn[tensorboard]`.

    Hyperparameters are shown in TensorBoard's HParams tab, by names with dots. A thread writes the
    files, every 10 seconds and at the end. If the run goes back to an earlier step, TensorBoard
    drops the older records of that step and of later steps.

    Args:
        directory: the run's directory; created if it does not exist. `backends["tensorboard"]` is
            the `SummaryWriter`.
        world: the run's world; rank 0 writes.
        step: pass `state.step` if you loaded the state from a checkpoint. TensorBoard then drops
            older records of later steps.

    Raises:
        TrackingError: the package tensorboard is missing, or the directory cannot be written.
    """
    if step is not None:
        check_step(step)
    open_sink = partial(_TensorBoard, directory, step)
    return custom(open_sink, name="tensorboard", world=world, accepts=(IMAGES,))


# `wandb`: track to a run of Weights & Biases.


class _Wandb:
    def __init__(self, offline: bool, **options: Any) -> None:  # noqa: FBT001 - private
        self._wandb = package("wandb", extra="wandb")
        self.backend = self._wandb.init(
            mode="offline" if offline else None,
            reinit="create_new",  # do not reuse a run that is already open in this process
            **options,
        )
        # W&B's built-in step would drop records of earlier or repeated steps
        self.backend.define_metric("*", step_metric="step")

    def metrics(self, metrics: Mapping[str, float], step: int) -> None:
        self.backend.log({**metrics, "step": step})

    def hyperparameters(self, hyperparameters: Mapping[str, Plain]) -> None:
        self.backend.config.update(dict(hyperparameters), allow_val_change=True)

    def images(self, images: Mapping[str, Pixels], step: int) -> None:
        wrap = self._wandb.Image
        record = {n: wrap(picture(image, extra="wandb")) for n, image in images.items()}
        self.backend.log({**record, "step": step})

    def close(self, *, failed: bool) -> None:
        self.backend.finish(exit_code=int(failed))


def wandb(
    project: str,
    *,
    world: World,
    directory: str | Path | None = None,
    name: str | None = None,
    run_id: str | None = None,
    offline: bool = False,
) -> Tracker:
    """Create a tracker that logs to a run of Weights & Biases; install `accelfn[wandb]`.

    Steps are logged as a metric `step`, the x axis of all other metrics. So if a run goes back to
    an earlier step, W&B keeps the records from before and after. W&B reads its settings, such as
    `WANDB_API_KEY`, from environment variables.

    Args:
        project: the project's name.
        world: the run's world; rank 0 tracks.
        directory: the folder for the run's files; default: W&B's `wandb/`.
        name: the run's name; default: W&B chooses a name.
        run_id: the run's id. Pass the same id again to continue the run.
        offline: whether to write only local files, which `wandb sync` uploads later.

    Raises:
        TrackingError: the package wandb is missing, or the run could not be opened.
    """
    options = {
        "project": project,
        "dir": None if directory is None else str(directory),
        "name": name,
        "id": run_id,
        "resume": None if run_id is None else "allow",
    }
    open_sink = partial(_Wandb, offline, **options)
    return custom(open_sink, name="wandb", world=world, accepts=(IMAGES,))


# `comet`: track to an experiment of Comet.


_NOTHING_UNASKED = dict.fromkeys(
    (
        *("log_code", "log_graph", "log_git_metadata", "log_git_patch"),
        *("log_env_details", "auto_output_logging", "auto_param_logging"),
        *("auto_metric_logging", "auto_histogram_weight_logging", "parse_args"),
        *("auto_histogram_gradient_logging", "auto_histogram_activation_logging"),
    ),
    False,
)


class _Comet:
    def __init__(self, settings: Mapping[str, Any], **options: Any) -> None:
        comet_ml = package("comet_ml", extra="comet")
        config = comet_ml.ExperimentConfig(**settings, **_NOTHING_UNASKED)
        self.backend = comet_ml.start(experiment_config=config, **options)

    def metrics(self, metrics: Mapping[str, float], step: int) -> None:
        self.backend.log_metrics(dict(metrics), step=step)

    def hyperparameters(self, hyperparameters: Mapping[str, Plain]) -> None:
        self.backend.log_parameters(flat(hyperparameters), nested_support=False)

    def images(self, images: Mapping[str, Pixels], step: int) -> None:
        for name, image in images.items():
            pixels = picture(image, extra="comet")
            # Comet itself only logs such errors
            if self.backend.log_image(pixels, name=name, step=step) is None:
                msg = f"Comet rejected the image {name!r}; Comet's log has the reason."
                raise TrackingError(msg)

    def close(self, *, failed: bool) -> None:
        if failed:
            self.backend.log_other("failed", value=True)
        self.backend.end()


def comet(
    project: str,
    *,
    world: World,
    directory: str | Path | None = None,
    name: str | None = None,
    run_id: str | None = None,
    offline: bool = False,
) -> Tracker:
    """Create a tracker that logs to an experiment of Comet; install `accelfn[comet]`.

    Comet's automatic collection of code, output, git data and environment is disabled. To log
    more, use the experiment in `backends["comet"]`. Comet reads its settings, such as
    `COMET_API_KEY`, from environment variables. If a run goes back to an earlier step, Comet keeps
    the records from before and after.

    Args:
        project: the project's name.
        world: the run's world; rank 0 tracks.
        directory: the folder for the archive of an offline experiment.
        name: the experiment's name; default: Comet chooses a name.
        run_id: the key of an experiment to continue: 32 to 50 letters and digits.
        offline: whether to write only a zip archive, which `comet upload` uploads later.

    Raises:
        TrackingError: the package comet_ml is missing, or the experiment could not be opened.
    """
    folder = None if directory is None else str(directory)
    options: dict[str, Any] = {
        "settings": {"name": name, "offline_directory": folder},
        "project_name": project,
        "experiment_key": run_id,
        "mode": "create" if run_id is None else "get_or_create",
        "online": not offline,
    }
    open_sink = partial(_Comet, **options)
    return custom(open_sink, name="comet", world=world, accepts=(IMAGES,))


# `mlflow`: track to a run of MLflow, with MLflow's client, which changes no global state.


_AT_ONCE = 100  # MLflow rejects more parameters in one call


class _MLflow:
    def __init__(
        self, experiment: str, store: str | None, name: str | None, run_id: str | None
    ) -> None:
        package("mlflow", extra="mlflow")
        self._entities = package("mlflow.entities", extra="mlflow")
        client = package("mlflow.tracking", extra="mlflow").MlflowClient(store)
        if run_id is None:
            entry = client.get_experiment_by_name(experiment)
            key = entry.experiment_id if entry else client.create_experiment(experiment)
            run_id = client.create_run(key, run_name=name).info.run_id
        else:
            client.update_run(run_id, status="RUNNING")
        self.backend, self._run = (client, run_id), run_id
        self._client = client

    def metrics(self, metrics: Mapping[str, float], step: int) -> None:
        now, kind = int(time.time() * 1000), self._entities.Metric
        self._log("metrics", [kind(n, v, now, step) for n, v in metrics.items()])

    def hyperparameters(self, hyperparameters: Mapping[str, Plain]) -> None:
        settings, kind = flat(hyperparameters), self._entities.Param
        self._log("params", [kind(n, str(value)) for n, value in settings.items()])

    def _log(self, kind: str, entries: list[Any]) -> None:
        for start in range(0, len(entries), _AT_ONCE):
            batch = {kind: entries[start : start + _AT_ONCE]}
            self._client.log_batch(self._run, **batch)

    def images(self, images: Mapping[str, Pixels], step: int) -> None:
        for name, image in images.items():
            self._client.log_image(self._run, image, key=name, step=step)

    def close(self, *, failed: bool) -> None:
        self._client.set_terminated(self._run, "FAILED" if failed else "FINISHED")


def mlflow(
    experiment: str,
    *,
    world: World,
    store: str | None = None,
    name: str | None = None,
    run_id: str | None = None,
) -> Tracker:
    """Create a tracker that logs to a run of MLflow; install `accelfn[mlflow]`.

    MLflow does not allow a second value for the same hyperparameter. If a run goes back to an
    earlier step, MLflow keeps the records from before and after. `backends["mlflow"]` is a tuple
    of MLflow's client and the run's id.

    Args:
        experiment: the experiment's name; created if it does not exist. Ignored with `run_id`,
            because that run belongs to an experiment already.
        world: the run's world; rank 0 tracks.
        store: the URI of a server, or of a database such as `sqlite:///runs.db`; default: the
            URI of MLflow's settings.
        name: the run's name; default: MLflow chooses a name.
        run_id: the id of a run to continue.

    Raises:
        TrackingError: the package mlflow is missing, or the run could not be opened.
    """
    open_sink = partial(_MLflow, experiment, store, name, run_id)
    return custom(open_sink, name="mlflow", world=world, accepts=(IMAGES,))
