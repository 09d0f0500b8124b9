# SPDX-License-Identifier: Apache-2.0
"""`wandb`: a run of Weights & Biases."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accelfn.base.calling import called
from accelfn.track.packages import package, picture
from accelfn.track.tracker import IMAGES, Tracker, open_tracker
from accelfn.track.values import Pixels, Plain
from accelfn.world import World


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
        shown = {n: wrap(picture(each, extra="wandb")) for n, each in images.items()}
        self.backend.log({**shown, "step": step})

    def close(self, *, failed: bool) -> None:
        self.backend.finish(exit_code=int(failed))


@called
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

    Steps are a metric of their own, `step`, by which the others are drawn, so that a run that
    goes back to an earlier step loses nothing: W&B keeps both branches. It reads its own
    settings, such as `WANDB_API_KEY`, from the environment.

    Args:
        project: its name there.
        world: that of the run; rank 0 tracks.
        directory: for the run's files; else as W&B does, in `wandb/`.
        name: of the run; W&B invents one.
        run_id: of a run that is gone on with, or will be.
        offline: write files alone, which `wandb sync` uploads later.

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
    return open_tracker(
        "wandb",
        lambda: _Wandb(offline, **options),
        world=world,
        accepts=(IMAGES,),
    )
