# SPDX-License-Identifier: Apache-2.0
"""What another's checkpoint has of a training: tensors that are read by boxes."""

from collections.abc import Callable, Mapping
from typing import Any, Self

import attrs
import torch

from accelfn.checkpoint.slices import Slice


@attrs.frozen(eq=False)
class Piece:
    """A tensor that lies in files.

    Attributes:
        dtype: of its values.
        shape: of the whole.
        read: gives the values of a box in it, in memory of their own.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[Slice], torch.Tensor]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Self:
        """Return one that has been read."""

        def read(box: Slice) -> torch.Tensor:
            return box.of(tensor).clone(memory_format=torch.contiguous_format)

        return cls(tensor.dtype, tuple(tensor.shape), read)


@attrs.frozen(kw_only=True, eq=False)
class Found:
    """What there is of a training.

    Attributes:
        weights: parameters and buffers, by their names in the model.
        entries: what an optimizer keeps of each parameter, by its name; numbers too.
        step: how many updates were taken, if that is said.
        strange: names beside the weights that are none of the model's.
        left: what else there is, which is not read.
    """

    weights: Mapping[str, Piece]
    entries: Mapping[str, Mapping[str, Any]]
    step: int | None = None
    strange: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
