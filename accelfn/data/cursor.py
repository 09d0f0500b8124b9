# SPDX-License-Identifier: Apache-2.0
"""Where training stands in its data: an epoch and how many of its samples were seen."""

from typing import Any

import attrs

from accelfn.base.arguments import integer
from accelfn.base.words import foreign


@foreign({}, changes="af.seek(state, samples, epoch=...) moves a state")
@attrs.frozen
class Cursor:
    """A position in the sample order, counted in global samples.

    It does not mention ranks, workers or micro-batches, so a run resumed on another
    number of them goes on at the very same sample.

    Attributes:
        epoch: which pass over the data, from 0.
        samples: how many samples of that epoch all ranks together have seen.
        memory: what a stream's own `state_dict()` said there, as a tree of plain data and
            tensors; None for what is read by index. Two cursors at one place are equal.
    """

    epoch: int = attrs.field(default=0, validator=integer(0, within=""))
    samples: int = attrs.field(default=0, validator=integer(0, within=""))
    memory: Any = attrs.field(default=None, eq=False, repr=False)

    @classmethod
    def reached(cls, epoch: int, samples: int) -> "Cursor":
        """Return one of numbers that were counted here: at each update, in half of the time."""
        made = object.__new__(cls)
        _set_epoch(made, epoch)
        _set_samples(made, samples)
        _set_memory(made, None)
        return made

    def to_plain(self) -> list[Any]:
        """Return its fields as plain data, to be saved or sent; `Cursor(*plain)` is it."""
        return [self.epoch, self.samples, self.memory]


# of a class with slots, what sets one is there without a name to be looked up
_set_epoch, _set_samples, _set_memory = (
    vars(Cursor)[each.name].__set__ for each in attrs.fields(Cursor)
)
