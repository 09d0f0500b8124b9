# SPDX-License-Identifier: Apache-2.0
"""A keyed permutation of the integers below n, and keyed draws: functions of a position.

Nothing here is as long as the dataset, so an epoch over 10**12 samples starts, and resumes,
at once.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from accelfn.base import draws

Indices: TypeAlias = npt.NDArray[np.int64]
Numbers: TypeAlias = npt.NDArray[np.uint64]

_ROUNDS = 6
_MULTIPLIERS = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9))
_LEAST = 3
"""Bits of half a number, at least: fewer are permuted in too few ways."""


def shuffled(positions: Indices, *, n: int, key: int) -> Indices:
    """Return where a keyed permutation of 0..n-1 puts these positions.

    A Feistel network permutes the next power of four at or above n (at least 64), and
    results of n or more are sent through it again until they fall below n, which keeps it
    a permutation (cycle walking; Black and Rogaway 2002, "Ciphers with Arbitrary Finite
    Domains"). Each index costs some 30 ns and depends on no other.
    """
    half = np.uint64(max(_LEAST, ((n - 1).bit_length() + 1) // 2))
    keys = [np.uint64(draws.fold(key, i)) for i in range(_ROUNDS)]
    permute: Callable[[Numbers], Numbers] = partial(_feistel, half=half, keys=keys)
    if half == _LEAST:  # few numbers walk far, and look up where
        permute = permute(np.arange(1 << 2 * _LEAST, dtype=np.uint64)).__getitem__
    result = permute(positions.astype(np.uint64))
    outside = np.flatnonzero(result >= n)
    while outside.size:
        walked = permute(result[outside])
        result[outside] = walked
        outside = outside[walked >= n]
    return result.astype(np.int64)


def _feistel(values: Numbers, half: np.uint64, keys: Sequence[np.uint64]) -> Numbers:
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


def uniform(positions: Indices, *, key: int) -> npt.NDArray[np.float64]:
    """Return a number in [0, 1) for each position, from (key, position) alone.

    The finaliser of splitmix64, as in `streams.fold`, of which the upper 53 bits are taken.
    """
    z = (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    z += np.uint64(key)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return (z >> np.uint64(11)).astype(np.float64) * 2.0**-53
