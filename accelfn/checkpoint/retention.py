# SPDX-License-Identifier: Apache-2.0
"""Retention: what is removed from a store, and never before a newer one was read back."""

import sys
from pathlib import Path

import attrs

from accelfn.checkpoint import keep as keeping
from accelfn.errors import CheckpointError


@attrs.define(kw_only=True)
class Retention:
    """What a store keeps.

    Attributes:
        directory: of the store.
        keep: how many of the newest; None: all.
        best: keep that one too which is best by this metric, if any.
        best_is: "min" or "max".
        has_said_no_best: whether it was said that none has that metric.
    """

    directory: Path
    keep: int | None
    best: str | None
    best_is: str
    has_said_no_best: bool = False

    def after(self, step: int) -> None:
        """Verify a new checkpoint, and then remove what is not kept.

        Raises:
            CheckpointError: it is not what was written; it has its name no longer.
        """
        if self.keep is None:
            return
        try:
            keeping.verify(self.directory / keeping.name_of(step))
        except CheckpointError:
            keeping.discard(self.directory, step)
            raise
        self._remove({step, *self._kept()})

    def before(self) -> None:
        """Remove what runs that ended behind a save, and before this, have left.

        Cost: where they have, the newest is read.
        """
        kept = self._kept()
        if not self._others(kept):
            return
        newest = self.directory / keeping.name_of(max(kept))
        try:
            keeping.verify(newest)
        except CheckpointError as error:
            sys.stderr.write(
                f"accelfn: older checkpoints than {newest} are kept: {error}\n"
            )
        else:
            self._remove(kept)

    def _kept(self) -> set[int]:
        """Return the steps that are kept, of those that are there."""
        steps = keeping.steps_in(self.directory)
        kept = set(steps if self.keep is None else steps[-self.keep :])
        if self.best is not None:
            kept.update(keeping.best_of(self.directory, self.best, self.best_is)[:1])
        return kept

    def _others(self, kept: set[int]) -> list[int]:
        return [s for s in keeping.steps_in(self.directory) if s not in kept]

    def _remove(self, kept: set[int]) -> None:
        others = self._others(kept)
        if others:
            self._say_no_best()
        for step in others:
            try:
                keeping.discard(self.directory, step)
            except OSError as error:  # the next save tries it again
                sys.stderr.write(
                    f"accelfn: {self.directory / keeping.name_of(step)} is to be removed,"
                    f" and is still there: {error}\n"
                )

    def _say_no_best(self) -> None:
        """Say, once, that some are removed though none has the metric that is best."""
        if self.best is None or self.has_said_no_best:
            return
        names = keeping.metrics_in(self.directory)
        if self.best not in names:
            self.has_said_no_best = True
            sys.stderr.write(
                f"accelfn: keep_best={self.best!r} keeps none: no checkpoint in"
                f" {self.directory} has that metric. Metrics that were given to save:"
                f" {', '.join(sorted(names)) or 'none'}.\n"
            )
