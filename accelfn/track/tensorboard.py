# SPDX-License-Identifier: Apache-2.0
"""`tensorboard`: event files, by torch's own writer."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accelfn.base.calling import called
from accelfn.track.packages import package
from accelfn.track.tracker import IMAGES, Tracker, open_tracker
from accelfn.track.values import Pixels, Plain, check_step, flat
from accelfn.world import World

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
        """Tell readers, where the run went back, to drop what they have of later steps."""
        if step < self._last:
            event = package("tensorboard.compat.proto.event_pb2", extra="tensorboard")
            log = event.SessionLog(status=event.SessionLog.START)
            self.backend.file_writer.add_event(
                event.Event(step=step, session_log=log), step
            )
        self._last = step

    def close(self, *, failed: bool) -> None:
        self.backend.close()


@called
def tensorboard(
    directory: str | Path, *, world: World, step: int | None = None
) -> Tracker:
    """Return a tracker that writes TensorBoard's event files; `accelfn[tensorboard]`.

    Hyperparameters go to its HParams tab, by names with dots. Its files are written by a
    thread, every 10 seconds and at the end. Where the run goes back to an earlier step, the
    files tell TensorBoard to drop what it has of that and later steps.

    Args:
        directory: of the run; it is made. `backends["tensorboard"]` is the `SummaryWriter`.
        world: that of the run; rank 0 writes.
        step: for a run that was loaded: `state.step`. What later steps have left counts no
            more.

    Raises:
        TrackingError: the package is missing, or the directory cannot be written.
    """
    if step is not None:
        check_step(step)
    return open_tracker(
        "tensorboard",
        lambda: _TensorBoard(Path(directory), step),
        world=world,
        accepts=(IMAGES,),
    )
