# SPDX-License-Identifier: Apache-2.0
"""One number a sample, as users give them: weights, lengths, costs."""

from collections.abc import Sized
from typing import Any

import numpy as np
import numpy.typing as npt

from accelfn.data.permutation import Indices
from accelfn.errors import ArgumentError, DataError


def as_counts(values: Any, where: str) -> Indices:
    """Return one integer a sample.

    Raises:
        ArgumentError: something else was given.
    """
    counts = as_array(values)
    if counts.ndim != 1 or counts.dtype.kind not in "iu" or (counts < 0).any():
        msg = f"{where}: got {seen(counts)}; expected one integer a sample, 0 or more."
        raise ArgumentError(msg)
    return counts.astype(np.int64)


def as_array(values: Any) -> npt.NDArray[Any]:
    """Return values as an array, of objects if nothing else can hold them."""
    try:
        return np.asarray(values)
    except ValueError:  # lists of different lengths
        return np.array([*values, None], dtype=object)[:-1]


def seen(found: npt.NDArray[Any]) -> str:
    """Return how values look that are not what they should be."""
    first = (
        ", ".join(map(repr, found[:3].tolist())) if found.ndim else repr(found.item())
    )
    more = ", ..." if found.ndim and len(found) > 3 else ""
    return f"[{first}{more}]" if found.ndim else first


def check_one_each(order: str, what: str, values: Sized, n: int) -> None:
    """Raise if there is not one for each sample."""
    if len(values) != n:
        msg = f"af.orders.{order}: {len(values)} {what} for a dataset of {n} samples."
        raise DataError(msg)
