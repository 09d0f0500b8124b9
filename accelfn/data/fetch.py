# SPDX-License-Identifier: Apache-2.0
"""From dataset indices to a batch, in one call a micro-batch."""

from collections.abc import Callable
from typing import Any, TypeAlias

import attrs

from accelfn.base import draws
from accelfn.data.permutation import Indices
from accelfn.data.sources import Source, collated

Collate: TypeAlias = Callable[[list[Any]], Any]


@attrs.frozen
class Task:
    """What is to be read: the indices of a micro-batch.

    Attributes:
        key: of the epoch's draws.
        first: the position in the epoch of the first sample.
        indices: of the samples in the dataset.
    """

    key: int
    first: int
    indices: Indices


@attrs.frozen
class Fetch:
    """Read and collate samples; what a worker process is given.

    What a dataset draws from torch's, numpy's or Python's default generator (augmentation)
    comes from (seed, epoch, position), so it does not depend on workers, ranks or
    micro-batches; of datasets side by side each has draws of its own. A `__getitems__` of
    the dataset's own draws for all its samples at once:
    there it comes from the first position.
    """

    source: Source
    collate: Collate | None

    @property
    def is_pure(self) -> bool:
        """Whether reading runs no code of the user's, so that nothing is drawn."""
        return self.collate is None and self.source.is_pure

    def __call__(self, task: Task) -> Any:
        """Return the collated samples."""
        if self.is_pure:
            return self.source.batch(task.indices, nothing)
        with draws.seeded() as drawing:

            def begin(place: int) -> None:
                drawing.begin(draws.fold(task.key, task.first + place))

            if self.collate is None:
                return self.source.batch(task.indices, begin)
            samples = self.source.samples(task.indices, begin)
            return collated(self.collate, samples, task.indices)


def nothing(_place: int) -> None:
    """Set no generator: nothing draws."""
