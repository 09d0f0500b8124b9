# SPDX-License-Identifier: Apache-2.0
"""Trackers for TensorBoard, Weights & Biases, Comet and MLflow."""

import time
from collections.abc import Mapping
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
    def __init__(self, directory: Path, step: int | None) -> None:
        package("tensorboard", extra="tensorboard")
        self._torch = package("torch.utils.tensorboard", extra="tensorboard")
        self._summary = package("torch.utils.tensorboard.summary", extra="tensorboard")
        self.backend = self._torch.SummaryWriter(
            str(directory),
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
        for record in self._summary.hparams(table, {}):
            self.backend.file_writer.add_summary(record)

    def images(self, images: Mapping[str, Pixels], step: int) -> None:
        self._reach(step)
        for name, image in images.items():
            self.backend.add_image(name, image, step, dataformats="HWC")

    def _reach(self, step: int) -> None:
        """Tell readers to drop later steps, if the run went back."""
        if step < self._last:
            event = package("tensorboard.compat.proto.event_pb2", extra="tensorboard")
            log = event.SessionLog(status=event.SessionLog.START)
            self.backend.file_writer.add_event(
                event.Event(step=step, session_log=log), step
            )
        self._last = step

    def close(self, *, failed: bool) -> None:
        self.backend.close()


def tensorboard(
    directory: str | Path, *, world: World, step: int | None = None
) -> Tracker:
    """Return a tracker that writes TensorBoard's event files; `accelfn[tensorboard]`.

    Hyperparameters go to its HParams tab, by names with dots. Its files are written by a
    thread, every 10 seconds and at the end. If the run goes back to an earlier step, the files
    tell TensorBoard to drop that step and later ones.

    Args:
        directory: the run's directory, which the tracker makes. `backends["tensorboard"]` is the
            `SummaryWriter`.
        world: the run's world; rank 0 writes.
        step: for a run that was loaded: `state.step`. Records of later steps are dropped.

    Raises:
        TrackingError: the package is missing, or the directory cannot be written.
    """
    if step is not None:
        check_step(step)
    return custom(
        lambda: _TensorBoard(Path(directory), step),
        name="tensorboard",
        world=world,
        accepts=(IMAGES,),
    )


# `wandb`: a run of Weights & Biases.


class _Wandb:
    def __init__(self, offline: bool, **options: Any) -> None:  # noqa: FBT001 - ours alone
        self._wandb = package("wandb", extra="wandb")
        self.backend = self._wandb.init(
            mode="offline" if offline else None,
            reinit="create_new",  # a run that somebody else has open is not this one
            **options,
        )
        # its own step drops, with a log line, what comes late or twice
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
    """Return a tracker that is a run of Weights & Biases; `accelfn[wandb]`.

    Steps are logged as a metric `step`, which is the x axis of the others. So a run that goes
    back to an earlier step loses nothing: W&B keeps both branches. W&B reads its settings, such
    as `WANDB_API_KEY`, from the environment.

    Args:
        project: the project's name.
        world: the run's world; rank 0 tracks.
        directory: the folder of the run's files; W&B's default is `wandb/`.
        name: the run's name; W&B invents one.
        run_id: the id of a run to continue, now or later.
        offline: only write files, which `wandb sync` uploads later.

    Raises:
        TrackingError: the package is missing, or the run could not be opened.
    """
    options = {
        "project": project,
        "dir": None if directory is None else str(directory),
        "name": name,
        "id": run_id,
        "resume": None if run_id is None else "allow",
    }
    return custom(
        lambda: _Wandb(offline, **options), name="wandb", world=world, accepts=(IMAGES,)
    )


# `comet`: an experiment of Comet.


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
    def __init__(
        self,
        project: str,
        run_id: str | None,
        *,
        name: str | None,
        directory: str | Path | None,
        offline: bool,
    ) -> None:
        comet_ml = package("comet_ml", extra="comet")
        settings = comet_ml.ExperimentConfig(
            name=name,
            offline_directory=None if directory is None else str(directory),
            **_NOTHING_UNASKED,
        )
        self.backend = comet_ml.start(
            project_name=project,
            experiment_key=run_id,
            mode="create" if run_id is None else "get_or_create",
            online=not offline,
            experiment_config=settings,
        )

    def metrics(self, metrics: Mapping[str, float], step: int) -> None:
        self.backend.log_metrics(dict(metrics), step=step)

    def hyperparameters(self, hyperparameters: Mapping[str, Plain]) -> None:
        self.backend.log_parameters(flat(hyperparameters), nested_support=False)

    def images(self, images: Mapping[str, Pixels], step: int) -> None:
        for name, image in images.items():
            pixels = picture(image, extra="comet")
            reply = self.backend.log_image(pixels, name=name, step=step)
            _check(reply, name)

    def close(self, *, failed: bool) -> None:
        if failed:
            self.backend.log_other("failed", value=True)
        self.backend.end()


def _check(reply: object, name: str) -> None:
    """Raise an error if Comet rejected values, because Comet only logs its errors."""
    if reply is None:
        msg = f"Comet did not take {name!r}; its log says why."
        raise TrackingError(msg)


def comet(
    project: str,
    *,
    world: World,
    directory: str | Path | None = None,
    name: str | None = None,
    run_id: str | None = None,
    offline: bool = False,
) -> Tracker:
    """Return a tracker that is an experiment of Comet; `accelfn[comet]`.

    Comet's automatic collection (code, output, git, environment) is off; use the experiment in
    `backends["comet"]` to log more. Comet reads its settings, such as `COMET_API_KEY`, from the
    environment. If a run goes back, Comet keeps both branches.

    Args:
        project: the project's name.
        world: the run's world; rank 0 tracks.
        directory: the folder for the archive of an offline experiment.
        name: the experiment's name; Comet invents one.
        run_id: the key of an experiment to continue: 32 to 50 letters and digits.
        offline: only write a zip archive, which `comet upload` uploads later.

    Raises:
        TrackingError: the package is missing, or the experiment could not be opened.
    """
    return custom(
        lambda: _Comet(
            project, run_id, name=name, directory=directory, offline=offline
        ),
        name="comet",
        world=world,
        accepts=(IMAGES,),
    )


# `mlflow`: a run of MLflow, by its client: no active run, no other global state.


_AT_ONCE = 100  # MLflow refuses more parameters in one call


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
        self._log(
            "metrics",
            [kind(name, value, now, step) for name, value in metrics.items()],
        )

    def hyperparameters(self, hyperparameters: Mapping[str, Plain]) -> None:
        settings, kind = flat(hyperparameters), self._entities.Param
        self._log(
            "params", [kind(name, str(value)) for name, value in settings.items()]
        )

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
    """Return a tracker that is a run of MLflow; `accelfn[mlflow]`.

    A parameter is written once: MLflow rejects another value for it. If a run goes back to an
    earlier step, MLflow keeps both branches.

    Args:
        experiment: the experiment's name; MLflow creates it if it does not exist. A `run_id`
            has its own.
        world: the run's world; rank 0 tracks.
        store: the URI of a server, or of a database such as `sqlite:///runs.db`; else what
            MLflow's settings say.
        name: the run's name; MLflow invents one.
        run_id: the id of a run to continue. `backends["mlflow"]` is the client and this id.

    Raises:
        TrackingError: the package is missing, or the run could not be opened.
    """
    return custom(
        lambda: _MLflow(experiment, store, name, run_id),
        name="mlflow",
        world=world,
        accepts=(IMAGES,),
    )
