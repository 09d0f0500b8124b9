# SPDX-License-Identifier: Apache-2.0
"""What another's checkpoint has of a training: tensors that are read by boxes."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import attrs
import torch

from accelfn.checkpoint.slices import Slice
from accelfn.errors import CheckpointCorruptError


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

    @classmethod
    def of_runs(cls, shape: tuple[int, ...], runs: Sequence[torch.Tensor]) -> Self:
        """Return one whose elements lie in flat tensors, one behind the other.

        Args:
            shape: of the whole.
            runs: its elements in order, the last dim fastest; one at least.

        Raises:
            CheckpointCorruptError: they are more or fewer than the shape has.
        """
        runs = [run.detach() for run in runs]
        ends = [0, *itertools.accumulate(map(len, runs))]
        if ends[-1] != math.prod(shape):
            msg = f"A tensor of {shape} has {ends[-1]} elements in its files."
            raise CheckpointCorruptError(msg)
        dtype = runs[0].dtype
        strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]

        def read(box: Slice) -> torch.Tensor:
            if not box.count:
                return torch.empty(box.size, dtype=dtype)
            begin = sum(map(math.prod, zip(box.offset, strides, strict=True)))
            last = (n - 1 for n in box.size)
            end = begin + sum(map(math.prod, zip(last, strides, strict=True))) + 1
            near = [
                run[max(begin - at, 0) : end - at]
                for at, run in zip(ends, runs, strict=False)
                if at < end and at + len(run) > begin
            ]
            return torch.cat(near).as_strided(box.size, strides).contiguous()

        return cls(dtype, shape, read)


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
