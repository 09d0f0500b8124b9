# SPDX-License-Identifier: Apache-2.0
"""The order of samples as a function: position in an epoch -> index in the dataset.

Every order here is computed a block at a time, from the seed and the epoch alone. Nothing
is as long as the dataset, so an epoch over 10**12 samples starts, and resumes, at once.
"""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from accelfn import streams
from accelfn.errors import DataError

Indices: TypeAlias = npt.NDArray[np.int64]
OrderFunction: TypeAlias = Callable[[int, int, int], Sequence[int]]
"""A user's own order: `(seed, epoch, n) -> indices`, which may be lazy."""

_ROUNDS = 6
_MULTIPLIERS = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9))


def sequential(positions: Indices) -> Indices:
    """Return the positions themselves."""
    return positions


def shuffled(positions: Indices, *, n: int, key: int) -> Indices:
    """Return where a keyed permutation of 0..n-1 puts these positions.

    A Feistel network permutes the next power of four at or above n (at least 64), and
    results of n or more are sent through it again until they fall below n, which keeps it
    a permutation (cycle walking; Black and Rogaway 2002, "Ciphers with Arbitrary Finite
    Domains"). Each index costs some 30 ns and depends on no other.
    """
    half = np.uint64(max(3, ((n - 1).bit_length() + 1) // 2))
    keys = [np.uint64(streams.fold(key, i)) for i in range(_ROUNDS)]
    result = _feistel(positions.astype(np.uint64), half, keys)
    outside = np.flatnonzero(result >= n)
    while outside.size:
        walked = _feistel(result[outside], half, keys)
        result[outside] = walked
        outside = outside[walked >= n]
    return result.astype(np.int64)


def _feistel(
    values: npt.NDArray[np.uint64], half: np.uint64, keys: Sequence[np.uint64]
) -> npt.NDArray[np.uint64]:
    """Permute the integers of `2 * half` bits."""
    mask = (np.uint64(1) << half) - np.uint64(1)
    high = np.uint64(32)
    left, right = values >> half, values & mask
    for key in keys:
        mixed = (right ^ key) * _MULTIPLIERS[0]
        mixed ^= mixed >> high
        mixed *= _MULTIPLIERS[1]
        left, right = right, left ^ ((mixed >> high) & mask)
    return (left << half) | right


def epoch_order(
    *, n: int, seed: int, epoch: int, shuffle: bool, own: OrderFunction | None
) -> Callable[[Indices], Indices]:
    """Return one epoch's order: a pure function from positions to dataset indices."""
    if own is not None:
        return _checked(own(seed, epoch, n), n=n, where=f"seed={seed}, epoch={epoch}")
    if not shuffle:
        return sequential
    key = streams.key(seed, "order", epoch)
    return lambda positions: shuffled(positions, n=n, key=key)


def _checked(
    indices: Sequence[int], *, n: int, where: str
) -> Callable[[Indices], Indices]:
    """Return a user's own order, its indices checked as they are read."""
    if len(indices) != n:
        msg = f"order({where}, n={n}) gave {len(indices)} indices; expected {n}."
        raise DataError(msg)

    def order(positions: Indices) -> Indices:
        found = np.array([indices[int(p)] for p in positions])
        whole = found.dtype.kind in "iu"
        if not whole or found.min() < 0 or found.max() >= n:
            wrong = [i for i in found.tolist() if not whole or not 0 <= i < n]
            msg = (
                f"order({where}, n={n}) gave the indices {wrong[:5]}; expected integers"
                f" from 0 to {n - 1}."
            )
            raise DataError(msg)
        return found.astype(np.int64)

    return order
