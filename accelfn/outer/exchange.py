# SPDX-License-Identifier: Apache-2.0
"""What ranks send each other of a fragment: by how much they moved away from the anchor.

Whole numbers cross in one sum. In few bits they cross in two halves, of which the second begins
half-way to when the mean is used; what rounding left out is remembered.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import attrs
import torch

from accelfn.base.arguments import Number
from accelfn.base.pending import Pending
from accelfn.base.shards import is_shard, local, with_local
from accelfn.base.valueless import is_positive
from accelfn.collectives import start_reduce
from accelfn.collectives.in_few_bits import (
    mean_of,
    start_mean,
    start_parts,
    summed,
)
from accelfn.world import World

Tensors: TypeAlias = dict[str, torch.Tensor]
Flight: TypeAlias = dict[str, Any]
"""A fragment on its way: `sent`, the update; `names`; `values`, pending; in few bits also
`half`, 1 or 2, and in the second `weight`, that of all ranks."""


def moved(params: Mapping[str, Any], anchor: Mapping[str, Any]) -> Tensors:
    """Return by how much this rank's parts moved, in float32 at least: a gradient's sign."""
    return {name: _wide(local(a)) - local(params[name]) for name, a in anchor.items()}


@attrs.frozen(kw_only=True)
class Exchange:
    """How fragments cross the ranks.

    Attributes:
        ranks: which.
        bits: of a number; 32 stands for all that it has.
        label: what the ranks are doing.
    """

    ranks: World
    bits: int
    label: str

    @property
    def is_whole(self) -> bool:
        """Whether numbers cross as they are: to itself a rank sends nothing."""
        return self.bits == 32 or self.ranks.size == 1

    def send(
        self,
        deltas: Tensors,
        error: Mapping[str, Any],
        weight: Number,
        sent: int,
        *,
        like: Mapping[str, Any],
    ) -> tuple[Flight, Mapping[str, Any]]:
        """Begin to send a fragment; return its flight, and what this rank remembers of it.

        Args:
            deltas: by how much each parameter of it moved.
            error: what this rank remembers, laid over the ranks as parameters are.
            weight: what this rank saw.
            sent: the update after which it is sent.
            like: what lies over the ranks as parameters do, by name.
        """
        flight: Flight = {"sent": sent, "names": list(deltas)}
        owed = {n: d + local(error[n]) if error else d for n, d in deltas.items()}
        if self.is_whole:
            sums = {name: each * weight for name, each in owed.items()}
            told = torch.zeros(1, dtype=torch.float64, device=self.ranks.device)
            told += weight
            values = {"sums": sums, "weight": told}
            pending = start_reduce(values, self.ranks, label=self.label)
            pending = pending.then(partial(_laid, like=like))
            return {**flight, "values": pending}, without(error, deltas)
        pending, left = start_parts(
            _flat(owed), weight, self.ranks, self.bits, label=self.label
        )
        kept = dict(zip(owed, _cut(left, owed), strict=True))
        new = {
            name: _like(error[name], _if_seen(weight, kept[name], local(error[name])))
            for name in owed
        }
        return {**flight, "half": 1, "values": pending}, {**error, **new}

    def go_on(
        self, flight: Flight, error: Mapping[str, Any]
    ) -> tuple[Flight, Mapping[str, Any]]:
        """Begin the second half of a flight in few bits; return what is remembered, too."""
        if flight.get("half") != 1:
            return flight, error
        names: Sequence[str] = flight["names"]
        parts = {name: local(error[name]) for name in names}
        flat = _flat(parts)
        pending, left, total = start_mean(
            flight["values"].wait(), self.ranks, self.bits, flat.dtype, label=self.label
        )
        # to a mean over all ranks it is one rank's share that this rank gives
        size = left.numel()
        begin = self.ranks.rank * size
        rest = left[: max(0, min(size, flat.numel() - begin))] * self.ranks.size
        flat[begin : begin + rest.numel()] += torch.where(total > 0, rest, 0)
        new = {
            name: _like(error[name], each.clone())
            for name, each in zip(names, _cut(flat, parts), strict=True)
        }
        flight = {**flight, "half": 2, "values": pending, "weight": total}
        return flight, {**error, **new}

    def arrived(self, flight: Flight, like: Mapping[str, Any]) -> Tensors | None:
        """Return the mean by name, of this rank's parts; None where no rank saw anything.

        Args:
            flight: in few bits, in its second half.
            like: tensors of this rank's parts, by name.
        """
        names: Sequence[str] = flight["names"]
        found = flight["values"].wait()
        if "half" not in flight:
            sums, total = found["sums"], found["weight"][0]
            if not is_positive(total):
                return None
            return {n: local(sums[n]) / total.to(sums[n].dtype) for n in names}
        if not is_positive(flight["weight"]):
            return None
        parts = {name: local(like[name]) for name in names}
        flat = mean_of(found, self.bits, _dtype_of(parts))
        return dict(zip(names, _cut(flat, parts), strict=True))


def met(
    flights: Sequence[Flight], bits: int, like: Mapping[str, Any]
) -> tuple[Flight, Tensors]:
    """Return the flight that all ranks would have had, and what rounding leaves out of it."""
    first = flights[0]
    if first.get("half") != 1:
        return first, {}
    parts = {name: like[name] for name in first["names"]}
    sums = [summed(f["values"].wait(), bits, _dtype_of(parts)) for f in flights]
    whole, total = torch.cat([coded for coded, _, _ in sums]), sums[0][2]
    left = torch.where(total > 0, torch.cat([each for _, each, _ in sums]), 0)
    flight = {**first, "half": 2, "values": Pending.of(whole), "weight": total}
    return flight, dict(zip(parts, _cut(left, parts), strict=True))


def without(error: Mapping[str, Any], names: Iterable[str]) -> Mapping[str, Any]:
    """Return what is remembered, once that of some parameters has been sent."""
    if not error:
        return error
    return {**error, **{name: torch.zeros_like(error[name]) for name in names}}


def _if_seen(weight: Number, new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """Return what is remembered: nothing new by a rank of whose numbers none was taken."""
    if isinstance(weight, torch.Tensor):
        return torch.where(weight > 0, new, old)
    return new.clone() if weight else old


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dtype.itemsize >= 4 else tensor.float()


def _dtype_of(parts: Mapping[str, torch.Tensor]) -> torch.dtype:
    """Return in what dtype numbers are added up that cross in few bits."""
    wide = any(part.dtype in _DOUBLE for part in parts.values())
    return torch.float64 if wide else torch.float32


_DOUBLE = (torch.float64, torch.complex128)


def _reals(part: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(part) if part.is_complex() else part


def _flat(parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the numbers of tensors, in order, as one vector."""
    dtype = _dtype_of(parts)
    return torch.cat([_reals(part).reshape(-1).to(dtype) for part in parts.values()])


def _cut(
    flat: torch.Tensor, like: Mapping[str, torch.Tensor]
) -> Iterator[torch.Tensor]:
    """Yield the parts of a vector, shaped as the tensors that it was made of."""
    begin = 0
    for part in like.values():
        shape = _reals(part).shape
        piece = flat[begin : begin + shape.numel()].view(shape)
        # pairs of numbers must begin at an even place
        yield torch.view_as_complex(piece.clone()) if part.is_complex() else piece
        begin += shape.numel()


def _laid(found: Mapping[str, Any], like: Mapping[str, Any]) -> dict[str, Any]:
    """Return sums that lie over the ranks as parameters do, so that files know them."""
    sums = {name: _like(like[name], each) for name, each in found["sums"].items()}
    return {**found, "sums": sums}


def _like(laid: Any, part: torch.Tensor) -> torch.Tensor:
    """Return a part as a tensor that lies over the ranks as another."""
    return with_local(laid, part) if is_shard(laid) else part
