# SPDX-License-Identifier: Apache-2.0
"""Replicas: ranks that should hold the same tell one another checksums of it."""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from accelfn.base import tree
from accelfn.base.arguments import Number
from accelfn.base.devices import readable
from accelfn.collectives.failures import format_tensor, naming
from accelfn.collectives.packed import all_gather, gather_text, is_same_text
from accelfn.errors import ReplicaMismatchError
from accelfn.world import World
from accelfn.world.world import fold_axes

_CREATED = (
    "Give TrainState.create a factory, which is drawn from the seed on every rank alike, or"
    " load the same weights on every rank."
)


def check_replicas(
    tensors: Mapping[str, torch.Tensor],
    world: World,
    *,
    label: str,
    values: bool,
    trained: Collection[str] | None = None,
    sums: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Raise unless all ranks hold tensors of the same names, shapes, dtypes and values.

    Where `trained` names some of them, they must be the same on all ranks too. `sums` are
    checksums of values that are not whole any more.

    Cost: a sum over every tensor, and two small all-reduces.

    Raises:
        ReplicaMismatchError: they do not; the first difference is named, a row a rank.
    """
    if world.size == 1:
        return
    shown = [
        f"{name}: {tuple(t.shape)} {t.dtype}"
        f"{'' if trained is None or name in trained else ', frozen'}"
        for name, t in tensors.items()
    ]
    tables = _tables_apart(shown, world, label=label)
    _refuse_difference(tables, "structure", _CREATED)
    if values:
        check_values(tensors, world, label=label, advice=_CREATED, sums=sums)


def check_values(
    tensors: Mapping[str, torch.Tensor],
    world: World,
    *,
    label: str,
    advice: str,
    sums: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Raise unless all ranks hold the same values; names, shapes and dtypes are known to be.

    Raises:
        ReplicaMismatchError: they do not; the first tensor that differs is named.
    """
    if world.size == 1 or not tensors:
        return
    if sums is None:
        mine = sums_of(tensors.values(), world, label=label)
    else:
        mine = torch.stack([sums[name] for name in tensors]).to(readable(world.device))
    if is_same_text(str(mine.tolist()), world, label=label):
        return
    rows = [row.tolist() for row in all_gather(mine, world, label=label)]
    named = [
        [f"{n}: checksum {c}" for n, c in zip(tensors, row, strict=True)]
        for row in rows
    ]
    _refuse_difference(named, "values", advice)


def check_rows(
    rows: Mapping[str, str], world: World, *, label: str, advice: str
) -> None:
    """Raise unless all ranks say the same of the same things, in the same order.

    Cost: one sum of six numbers; where ranks differ, two all-gathers, of all that they say.

    Raises:
        ReplicaMismatchError: they do not; the first difference is named, a row a rank.
    """
    if world.size == 1:
        return
    said = [f"{name}: {row}" for name, row in rows.items()]
    differing = first_difference(_tables_apart(said, world, label=label))
    if differing is not None:
        msg = (
            "The ranks hold states that differ; this is the first of what"
            f" differs:\n{differing}\n{advice}"
        )
        raise ReplicaMismatchError(msg)


def _tables_apart(lines: list[str], world: World, *, label: str) -> list[list[str]]:
    """Return the lines of all ranks, where they differ; else none of anybody's."""
    said = "\n".join(lines)
    if is_same_text(said, world, label=label):
        return []
    return [text.split("\n") for text in gather_text(said, world, label=label)]


def first_difference(tables: Sequence[Sequence[str]]) -> str | None:
    """Return the first row that is not the same in all ranks' tables, a line a rank."""
    found = _first_difference(tables)
    return None if found is None else _format_ranks(found[1])


def check_sums(
    sums: Mapping[str, torch.Tensor],
    weight: Number,
    world: World,
    *,
    label: str,
    is_first: bool,
) -> None:
    """Raise unless all ranks hold the same sums, of the same weight, bit by bit.

    Cost: a sum over every tensor and a small all-reduce, where it is the first time or the
    world is checked; else none. Simulated ranks always compare, without a collective.

    Raises:
        ReplicaMismatchError: they do not; the first difference is named, a row a rank.
    """
    simulated = world.connection.simulated
    if simulated is None and not (is_first or world.checked):
        return
    rows = {"the weight": f"{float(weight)!r}"}
    dense = {n: t for n, t in sums.items() if t.layout is torch.strided}
    rows |= {
        n: f"{format_tensor(t)}, checksum {int(checksum(t))}" for n, t in dense.items()
    }
    if simulated is None:
        check_rows(rows, world, label=label, advice=_SUMS)
        return
    said = [f"{name}: {row}" for name, row in rows.items()]
    other = simulated.compare(label, said)
    if other is not None:
        ranks, tables = zip(*sorted([other, (world.rank, said)]), strict=True)
        found = _first_difference(list(tables))
        assert found is not None  # noqa: S101 - they are not equal
        lines = zip(ranks, found[1], strict=True)
        listed = "\n".join(f"  rank {rank}: {row}" for rank, row in lines)
        msg = f"Ranks {ranks[0]} and {ranks[1]} differ in {label}:\n{listed}\n{_SUMS}"
        raise ReplicaMismatchError(msg)


_SUMS = (
    "Return grads.with_sums(sums, weight) of what is the same on all ranks, bit by bit, as"
    " what af.reduce and af.gather give is."
)


def _refuse_difference(tables: list[list[str]], what: str, advice: str) -> None:
    found = _first_difference(tables)
    if found is not None:
        place, rows = found
        msg = (
            f"The ranks hold models that differ in {what}; tensor {place} is the first"
            f" that differs:\n{_format_ranks(rows)}\n{advice}"
        )
        raise ReplicaMismatchError(msg)


def _first_difference(
    tables: Sequence[Sequence[str]],
) -> tuple[int, list[str]] | None:
    for place in range(max((len(table) for table in tables), default=0)):
        rows = [t[place] if place < len(t) else "nothing" for t in tables]
        if len(set(rows)) > 1:
            return place, rows
    return None


def _format_ranks(rows: Sequence[str]) -> str:
    return "\n".join(f"  rank {rank}: {row}" for rank, row in enumerate(rows))


def sums_of(
    tensors: Iterable[torch.Tensor], world: World, *, label: str
) -> torch.Tensor:
    """Return checksums: of a tensor that is split, that of all parts of this rank's copy.

    Where a rank has a part it is a collective.
    """
    listed = list(tensors)
    here = (checksum(tree.local(tensor)) for tensor in listed)
    sums = torch.stack([each.to(readable(world.device)) for each in here])
    alike: dict[tuple[str, ...], list[int]] = {}
    for i, tensor in enumerate(listed):
        alike.setdefault(tree.cut_axes(tensor), []).append(i)
    for axes, split in alike.items():
        if axes:
            copy = fold_axes(world).along(*axes)
            parts = torch.stack(all_gather(sums[split], copy, label=label))
            sums[split] = torch.stack([checksum(each) for each in parts.unbind(1)])
    return sums


_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
"""As what an element's bits are read, by its size; 8 bytes are two words."""
_CHUNK = 1 << 15
"""Words at a time: what is made of them stays in a processor's cache, and with one thread."""
_LARGE_CHUNK = 1 << 22
"""On another device, where each call costs more."""


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Return a number that depends on every bit of a tensor, and on where it stands.

    Each word of bits is multiplied by an odd number of its place, modulo 2**64, and its upper
    half mixed into the lower before all are added: neither what two elements exchange nor
    what one has more and another less cancels out.

    Cost: a few passes over the tensor, of which no copy is made.
    """
    if tensor.is_meta:
        return torch.zeros((), dtype=torch.int64)
    plain = tensor.detach().resolve_conj().resolve_neg()
    plain = torch.view_as_real(plain) if plain.is_complex() else plain
    flat = plain.contiguous().reshape(-1)
    # a lone element may keep a stride of 2, with which it is no two words
    words = flat.as_strided(flat.shape, (1,)).view(_WORDS[flat.element_size()])
    length = _CHUNK if words.is_cpu else _LARGE_CHUNK
    factors = _odd(torch.arange(min(len(words), length), device=words.device))
    chunks = words.split(length)
    sums = [_mix_bits(each * factors[: len(each)]).sum() for each in chunks]
    if len(sums) == 1:
        return sums[0]
    each = _odd(torch.arange(len(sums), device=words.device))
    return _mix_bits(torch.stack(sums) * each).sum()


def _odd(places: torch.Tensor) -> torch.Tensor:
    """Return an odd number for each place; they look as if drawn."""
    drawn = (places + 1) * 0x1E3779B97F4A7C15
    drawn = _mix_bits(drawn) * 0x3F58476D1CE4E5B9
    return _mix_bits(drawn) | 1


def _mix_bits(numbers: torch.Tensor) -> torch.Tensor:
    return numbers ^ (numbers >> 32)


# Whole tensors of those of which each rank has a part; many of them in one call.


_MOST = 32 << 20
"""Bytes of whole tensors that one call gathers, or those of one that is larger."""


def gather_full(
    tensors: Mapping[str, torch.Tensor], world: World, *, label: str
) -> dict[str, torch.Tensor]:
    """Return tensors of which each rank has all; those that are parts are gathered.

    What `by_calls` yields, and plain tensors as they are.
    """
    found = dict(tensors)
    for some in by_calls(tensors, world, label=label):
        found |= some
    return found


def by_calls(
    tensors: Mapping[str, torch.Tensor], world: World, *, label: str
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the wholes of those tensors that are parts, as many at once as one call gathers.

    A collective of all ranks, all of which go through it to its end.

    Args:
        tensors: by name, the same on all ranks.
        world: whose ranks have the parts.
        label: what the ranks are doing.

    The wholes lie on the world's device, where parts may not be.

    Law: bitwise what was cut.

    Cost: of each axis along which they are cut, a gather for every 32 MiB of whole tensors of
        one dtype, twice as many at most; of a tensor that a user has cut in another way than a
        layout does, those of torch.
    """
    parts: dict[str, Any] = {n: t for n, t in tensors.items() if tree.is_shard(t)}
    if not parts:
        return
    axes = fold_axes(world)
    mesh = axes.mesh if axes.size > 1 else None
    ours = {n: t for n, t in parts.items() if t.device_mesh == mesh and _in_turn(t)}
    for names in _gather_groups(ours):
        yield _gather_shards({n: ours[n] for n in names}, axes, label)
    for name, tensor in parts.items():
        if name not in ours:  # a user's own
            with naming(label, world):
                whole = tensor.full_tensor()
            yield {name: whole}


def _in_turn(tensor: Any) -> bool:
    """Whether a tensor is cut as layouts cut: along the last axis first, the parts further.

    Of a dim that is cut along two axes, the parts that are cut further are of one length.
    """
    placed = list(enumerate(tensor.placements))
    for place, placement in placed:
        if placement.is_replicate():
            continue
        if type(placement).__name__ not in ("Shard", "_StridedShard"):
            return False  # summands
        dim = placement.dim
        later = [i for i, each in placed[place + 1 :] if each.is_shard(dim)]
        count = math.prod(tensor.device_mesh.size(i) for i in later)
        even = tensor.shape[dim] % count == 0
        if getattr(placement, "split_factor", 1) != count or not even:
            return False
    return True


def _gather_groups(tensors: Mapping[str, Any]) -> Iterator[list[str]]:
    """Yield the names of parts that are gathered in the same calls."""
    alike: dict[Any, list[str]] = {}
    for name, tensor in tensors.items():
        alike.setdefault((tensor.dtype, tree.cut_axes(tensor)), []).append(name)
    for names in alike.values():
        size, taken = 0, list[str]()
        for name in names:
            nbytes = tensors[name].numel() * tensors[name].element_size()
            if taken and size + nbytes > _MOST:
                yield taken
                size, taken = 0, []
            taken.append(name)
            size += nbytes
        yield taken


def _gather_shards(
    tensors: Mapping[str, Any], world: World, label: str
) -> dict[str, torch.Tensor]:
    """Gather tensors of one dtype that are cut along the same axes, axis by axis."""
    parts = {name: tree.local(tensor).detach() for name, tensor in tensors.items()}
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    axes = tree.cut_axes(next(iter(tensors.values())))
    for axis in axes:  # a part along "dp_shard" is one of a part along "tp"
        ranks = world.along(axis)
        cuts = {n: _dim(tensor, axis) for n, tensor in tensors.items()}
        inner = {
            n: _inner(tensor, axes[axes.index(axis) + 1 :], cuts[n], world)
            for n, tensor in tensors.items()
        }
        lengths = {n: shapes[n][cuts[n]] // inner[n] for n in parts}
        parts = _along(parts, cuts, lengths, ranks, label)
    return parts


def _dim(tensor: Any, axis: str) -> int:
    """Return the dim at which a tensor is cut along an axis."""
    place = tensor.device_mesh.mesh_dim_names.index(axis)
    return tensor.placements[place].dim


def _inner(tensor: Any, axes: tuple[str, ...], dim: int, world: World) -> int:
    """Return into how many parts a dim is cut along further axes, which is evenly."""
    count = 1
    for axis in axes:
        count *= world.along(axis).size if _dim(tensor, axis) == dim else 1
    return count


def _along(
    parts: Mapping[str, torch.Tensor],
    dims: Mapping[str, int],
    lengths: Mapping[str, int],
    ranks: World,
    label: str,
) -> dict[str, torch.Tensor]:
    """Return what ranks have together of tensors that are cut as `torch.chunk` does.

    Args:
        parts: of this rank.
        dims: at which each is cut.
        lengths: of all parts together, at that dim.
        ranks: those that have the parts, in order.
        label: what they are doing.
    """
    rooms = {n: -(-lengths[n] // ranks.size) for n in parts}  # of the first rank
    sent = [_pad_dim(part, dims[n], rooms[n]) for n, part in parts.items()]
    flat = torch.cat([each.reshape(-1) for each in sent]).to(ranks.device)
    rows = all_gather(flat, ranks, label=label)
    of_each = zip(*(row.split([e.numel() for e in sent]) for row in rows), strict=True)
    found: dict[str, torch.Tensor] = {}
    for name, like, got in zip(parts, sent, of_each, strict=True):
        dim, room, left = dims[name], rooms[name], lengths[name]
        ends = [min(max(left - i * room, 0), room) for i in range(ranks.size)]
        each = zip(got, ends, strict=True)
        trimmed = [part.view(like.shape).narrow(dim, 0, end) for part, end in each]
        found[name] = torch.cat(trimmed, dim).contiguous()
    return found


def _pad_dim(part: torch.Tensor, dim: int, length: int) -> torch.Tensor:
    """Return a part that is as long as the longest one."""
    if part.shape[dim] == length:
        return part.contiguous()
    shape = [*part.shape]
    shape[dim] = length
    made = part.new_zeros(shape)
    made.narrow(dim, 0, part.shape[dim]).copy_(part)
    return made
