# SPDX-License-Identifier: Apache-2.0
"""`Batch`: what one step consumes, with the place it has in the data."""

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any, NoReturn, TypeAlias

import attrs
import numpy as np
import numpy.typing as npt
import torch

from accelfn.base import tree, words
from accelfn.base.words import foreign
from accelfn.data.cursor import Cursor
from accelfn.data.permutation import Indices
from accelfn.errors import BatchError, CallError

Filler: TypeAlias = bool | npt.NDArray[np.bool_]
"""Whether samples are filler: all of a micro-batch, none, or one by one."""


@foreign(
    words.BATCH,
    changes="it is what was read; another value goes to step(state, value) as it is",
    getitem=words.BATCH_IS_NO_VALUE,
)
@attrs.frozen(kw_only=True, eq=False, slots=False)  # a dict is filled sooner than slots
class Batch:
    """This rank's share of one update's samples.

    Attributes:
        micro_batches: collated values on the world's device; one, unless the setup
            accumulates.
        weights: how many samples count in each; None: as many as it has. An empty share
            holds one sample that does not count, so that its rank takes part in every
            collective.
        start: where the data stood before it; None for one that `af.lockstep` made.
        cursor: where it stands after it.
        num_samples: of the whole batch, over all ranks and micro-batches.
        parts_indices: dataset indices of this rank's samples, one array a micro-batch.
        parts_filler: which of them are filler: repeats that fill a padded batch, or the
            stand-in of an empty share.
        shares: returns how many samples each rank has, in each of its micro-batches; None
            for unknown numbers.
        part: which micro-batch of the batch this is, if it is one of `parts()`.
    """

    micro_batches: tuple[Any, ...]
    weights: tuple[int | None, ...]
    start: Cursor | None
    cursor: Cursor | None
    num_samples: int
    parts_indices: tuple[Indices, ...]
    parts_filler: tuple[Filler, ...]
    shares: Callable[[], Sequence[Sequence[int | None]]] | None = None
    part: int = 0

    @property
    def value(self) -> Any:
        """The one collated value.

        Raises:
            BatchError: the setup accumulates, so there are several.
        """
        if len(self.micro_batches) != 1:
            msg = (
                f"This batch has {len(self.micro_batches)} micro-batches: read"
                " batch.micro_batches."
            )
            raise BatchError(msg)
        return self.micro_batches[0]

    @property
    def epoch(self) -> int:
        """Which pass over the data it belongs to, from 0."""
        return 0 if self.start is None else self.start.epoch

    @property
    def ends_epoch(self) -> bool:
        """Whether it is the last of its epoch."""
        if self.start is None or self.cursor is None:
            return False
        return self.cursor.epoch > self.start.epoch

    @property
    def indices(self) -> torch.Tensor:
        """Dataset indices of this rank's samples, in the order of the values."""
        return torch.from_numpy(np.concatenate(self.parts_indices))

    @property
    def filler(self) -> torch.Tensor:
        """Which of those samples are filler, as booleans."""
        masks = [
            np.broadcast_to(np.asarray(filler, bool), len(indices))
            for indices, filler in zip(
                self.parts_indices, self.parts_filler, strict=True
            )
        ]
        return torch.from_numpy(np.concatenate(masks))

    @classmethod
    def __torch_function__(cls, *_: object) -> NoReturn:
        """Refuse to be a tensor, as in model(batch)."""
        msg = f"A Batch is no tensor: {words.BATCH_IS_NO_VALUE}."
        raise CallError(msg)

    def parts(self) -> list["Batch"]:
        """Return one batch a micro-batch."""
        return [
            attrs.evolve(
                self,
                micro_batches=(self.micro_batches[i],),
                weights=(self.weights[i],),
                parts_indices=(self.parts_indices[i],),
                parts_filler=(self.parts_filler[i],),
                part=self.part + i,
            )
            for i in range(len(self.micro_batches))
        ]

    def zip(self, *extras: Any) -> "Batch":
        """Return the batch with tensors that belong to its samples: (value, *extras).

        They are cut with it into micro-batches.

        Args:
            extras: trees of tensors with a row for each of this rank's samples, in the order
                of `indices`, which has the stand-in of an empty share too.

        Raises:
            BatchError: there are more rows, or fewer.
        """
        sizes = [len(each) for each in self.parts_indices]
        found, wanted = {tree.num_rows(each) for each in extras}, sum(sizes)
        if found != {wanted}:
            msg = (
                f"batch.zip: the extras have {sorted(found)} rows; expected one for each of"
                f" this rank's {wanted} samples, as in table[batch.indices]."
            )
            raise BatchError(msg)
        spans = pairwise([0, *accumulate(sizes)])
        values = tuple(
            (value, *(tree.rows(extra, *span) for extra in extras))
            for value, span in zip(self.micro_batches, spans, strict=True)
        )
        return attrs.evolve(self, micro_batches=values)

    def __repr__(self) -> str:
        """Show its place, not its tensors."""
        if self.start is None:
            return f"<Batch of a stream, {len(self.micro_batches)} micro-batches>"
        return (
            f"<Batch of {self.num_samples} samples, {sum(w or 0 for w in self.weights)} here"
            f" in {len(self.micro_batches)} micro-batches, epoch {self.epoch} from sample"
            f" {self.start.samples}>"
        )
