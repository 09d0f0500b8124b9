# SPDX-License-Identifier: Apache-2.0
"""What ranks pass on to the next, until it has been with all of them: a ring.

Each pass is under way while ranks compute with what they have.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from accelfn.collectives.naming import naming
from accelfn.world import World


def owners(ranks: World) -> list[int]:
    """Return whose tensors a rank has, in order: its own first, then those of ranks before it."""
    return [(ranks.rank - hop) % ranks.size for hop in range(ranks.size)]


def around(
    tensors: Sequence[torch.Tensor], ranks: World, *, label: str
) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield every rank's tensors, in the order of `owners`.

    The next ones travel while the caller has what was yielded.

    Args:
        tensors: of one dtype, and of the same shapes on all ranks.
        ranks: who passes them on.
        label: what the ranks are doing.
    """
    held = _flat(tensors)
    for _ in range(ranks.size - 1):
        coming = _Passed(held, ranks, label)
        yield _cut(held, tensors)
        held = coming.arrived()
    yield _cut(held, tensors)


class Homewards:
    """Sums that go round behind what is passed on, and end with its owner."""

    def __init__(
        self, like: Sequence[torch.Tensor], ranks: World, *, label: str
    ) -> None:
        """Begin with zeros, of the dtype and shapes of what each rank has."""
        self._like, self._ranks, self._label = like, ranks, label
        self._begun = torch.zeros_like(_flat(like))
        self._coming: _Passed | None = None

    def add(self, parts: Sequence[torch.Tensor], columns: slice) -> None:
        """Add to the sums of whose tensors this rank has, at places of dim 2; pass them on."""
        sums = self._begun if self._coming is None else self._coming.arrived()
        for whole, part in zip(_cut(sums, self._like), parts, strict=True):
            whole[:, :, columns] += part
        self._coming = _Passed(sums, self._ranks, self._label)

    def arrived(self) -> tuple[torch.Tensor, ...]:
        """Return this rank's own sums, after as many additions as there are ranks."""
        sums = self._begun if self._coming is None else self._coming.arrived()
        return _cut(sums, self._like)


class _Passed:
    """A vector on its way to the next rank, and the one that comes from before."""

    def __init__(self, sent: torch.Tensor, ranks: World, label: str) -> None:
        size = ranks.size
        leaving, coming = [0] * size, [0] * size
        leaving[(ranks.rank + 1) % size] = len(sent)
        coming[(ranks.rank - 1) % size] = len(sent)
        self._got, self._label, self._ranks = torch.empty_like(sent), label, ranks
        with naming(label, ranks):
            self._work: Any = dist.all_to_all_single(
                self._got, sent, coming, leaving, group=ranks.group, async_op=True
            )

    def arrived(self) -> torch.Tensor:
        with naming(self._label, self._ranks, begins=False):
            self._work.wait()
        return self._got


def _flat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([each.flatten() for each in tensors])


def _cut(flat: torch.Tensor, like: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Return views of a vector, of these shapes."""
    parts = flat.split([each.numel() for each in like])
    return tuple(p.view(each.shape) for p, each in zip(parts, like, strict=True))
