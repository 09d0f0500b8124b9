# SPDX-License-Identifier: Apache-2.0
"""Samples that a person can read: small integers, whose sums are exact, or tenths."""

from collections.abc import Iterable
from typing import Any, TypeAlias

import attrs
import torch
from hypothesis import strategies as st

from accelfn.errors import ArgumentError
from accelfn.testing.strategies.code import print_code

Table: TypeAlias = tuple[tuple[float, ...], ...]


def _as_table(rows: Iterable[Iterable[float]]) -> Table:
    return tuple(tuple(row) for row in rows)


@attrs.frozen(repr=False)
class Samples:
    """A map-style dataset of inputs and targets, as rows of numbers.

    Attributes:
        inputs: one row a sample.
        targets: one row a sample.

    Raises:
        ArgumentError: there are not as many targets as inputs.

    Example:
        >>> Samples([[1, 2, 0]], [[3, 4]])[0]
        (tensor([1., 2., 0.], dtype=torch.float64), tensor([3., 4.], dtype=torch.float64))
    """

    inputs: Table = attrs.field(converter=_as_table)
    targets: Table = attrs.field(converter=_as_table)

    _repr_pretty_ = print_code

    def __attrs_post_init__(self) -> None:
        """Compare the numbers of rows."""
        if len(self.inputs) != len(self.targets):
            msg = (
                f"Samples: {len(self.inputs)} rows of inputs but"
                f" {len(self.targets)} of targets; expected one of each a sample."
            )
            raise ArgumentError(msg)

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """All inputs and all targets, in float64; what `af.Data` reads fastest."""
        return _tensor(self.inputs), _tensor(self.targets)

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return one sample."""
        return _tensor(self.inputs[index]), _tensor(self.targets[index])

    def __repr__(self) -> str:
        """Return the call that makes it, the rows as lists."""
        shown = [[list(row) for row in table] for table in (self.inputs, self.targets)]
        return f"Samples({shown[0]}, {shown[1]})"


def _tensor(numbers: Any) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def datasets(
    *,
    dyadic: bool | None = None,
    inputs: int = 3,
    outputs: int = 2,
    min_size: int = 1,
    max_size: int = 12,
) -> st.SearchStrategy[Samples]:
    """Draw a few samples.

    Args:
        dyadic: True for integers from -3 to 3, whose sums and products are exact; False
            for their 1.1-fold, whose sums are rounded; None for either.
        inputs: features of a sample.
        outputs: targets of a sample.
        min_size: how many samples at least.
        max_size: how many at most.
    """
    if dyadic is None:
        shapes = (inputs, outputs, min_size, max_size)
        return _samples(_INTEGERS, *shapes) | _samples(_TENTHS, *shapes)
    numbers = _INTEGERS if dyadic else _TENTHS
    return _samples(numbers, inputs, outputs, min_size, max_size)


_INTEGERS = st.integers(-3, 3)
_TENTHS = _INTEGERS.map(lambda number: number + number / 10)


def _samples(
    numbers: st.SearchStrategy[Any],
    inputs: int,
    outputs: int,
    min_size: int,
    max_size: int,
) -> st.SearchStrategy[Samples]:
    wide = inputs + outputs
    row = st.lists(numbers, min_size=wide, max_size=wide)
    # the number first: a list that may not be empty does not shrink to its last row alone
    sizes = st.integers(min_size, max_size)
    rows = sizes.flatmap(lambda n: st.lists(row, min_size=n, max_size=n))
    return rows.map(
        lambda drawn: Samples(
            [row[:inputs] for row in drawn], [row[inputs:] for row in drawn]
        )
    )
