# SPDX-License-Identifier: Apache-2.0
"""`comet`: an experiment of Comet."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accelfn.base.calling import called
from accelfn.errors import TrackingError
from accelfn.track.packages import package, picture
from accelfn.track.tracker import IMAGES, Tracker, open_tracker
from accelfn.track.values import Pixels, Plain, flat
from accelfn.world import World

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
    def __init__(self, project: str, run_id: str | None, **options: Any) -> None:
        comet_ml = package("comet_ml", extra="comet")
        offline, directory, name = (
            options[key] for key in ("offline", "directory", "name")
        )
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
            shown = picture(image, extra="comet")
            sent = self.backend.log_image(shown, name=name, step=step)
            _check(sent, name)

    def close(self, *, failed: bool) -> None:
        if failed:
            self.backend.log_other("failed", value=True)
        self.backend.end()


def _check(sent: object, name: str) -> None:
    """Raise where Comet, which logs its errors and raises none, took nothing."""
    if sent is None:
        msg = f"Comet did not take {name!r}; its log says why."
        raise TrackingError(msg)


@called
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

    What Comet collects unasked (code, output, git, environment) is off: `backends["comet"]`
    is the experiment, which logs what you tell it to. It reads its own settings, such as
    `COMET_API_KEY`, from the environment. Of a run that goes back it keeps both branches.

    Args:
        project: its name there.
        world: that of the run; rank 0 tracks.
        directory: for the archive of an offline experiment.
        name: of the experiment; Comet invents one.
        run_id: the key of an experiment that is gone on with: 32 to 50 letters and digits.
        offline: write a zip archive alone, which `comet upload` uploads later.

    Raises:
        TrackingError: the package is missing, or the experiment could not be opened.
    """
    options = {"offline": offline, "directory": directory, "name": name}
    return open_tracker(
        "comet",
        lambda: _Comet(project, run_id, **options),
        world=world,
        accepts=(IMAGES,),
    )
