# SPDX-License-Identifier: Apache-2.0
"""The orders in which ranks' tensors are added up: a sum of floats depends on it.

A backend takes the order that is fastest, and the same in each run; which one that is
depends on the number of ranks and on where in a buffer a number lies. What is to be the same
bitwise may depend on none of it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, TypeAlias

import torch

Sums: TypeAlias = Literal["ranks", "ring", "tree"]
Operation: TypeAlias = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Parts: TypeAlias = Sequence[torch.Tensor]

_OPERATIONS: Mapping[str, Operation] = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}


def reduced(op: str, parts: Parts, sums: Sums) -> torch.Tensor:
    """Return what all ranks' tensors are together; it is the same on all of them."""
    # nothing is cut out of a sparse tensor, and it has no place in a buffer
    dense = parts[0].layout is torch.strided
    total = (_ORDERS[sums] if dense else _by_rank)(_OPERATIONS[op], parts)
    return total / len(parts) if op == "AVG" else total


def _by_rank(operate: Operation, parts: Parts) -> torch.Tensor:
    """From the first rank to the last."""
    total = parts[0]
    for part in parts[1:]:
        total = operate(total, part)
    return total


def _around(operate: Operation, parts: Parts) -> torch.Tensor:
    """Each piece of the buffer from another rank on, as a ring passes pieces round."""
    size = len(parts)
    pieces = [each.reshape(-1).tensor_split(size) for each in parts]
    passed = [
        _by_rank(operate, [pieces[(i + k) % size][i] for k in range(1, size + 1)])
        for i in range(size)
    ]
    return torch.cat(passed).view_as(parts[0])


def _by_pairs(operate: Operation, parts: Parts) -> torch.Tensor:
    """Neighbours first, and then their sums, as a tree does."""
    while len(parts) > 1:
        pairs = zip(parts[::2], parts[1::2], strict=False)
        odd = parts[len(parts) - len(parts) % 2 :]
        parts = [*(operate(one, two) for one, two in pairs), *odd]
    return parts[0]


_ORDERS: Mapping[Sums, Callable[[Operation, Parts], torch.Tensor]] = {
    "ranks": _by_rank,
    "ring": _around,
    "tree": _by_pairs,
}
