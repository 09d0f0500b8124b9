# SPDX-License-Identifier: Apache-2.0
"""Replicas: ranks compare checksums of tensors that must be equal on all ranks."""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from accelfn.base import tree
from accelfn.base.arguments import Number
from accelfn.base.devices import readable
from accelfn.collectives.failures import format_tensor, naming
from accelfn.collectives.packed import (
    all_gather_list,
    all_gather_rows,
    gather_text,
    is_same_text,
)
from accelfn.errors import ReplicaMismatchError
from accelfn.world import World
from accelfn.world.world import fold_axes

_CREATED = (
    "Pass a function to TrainState.create(model=...), which then creates equal values on all"
    " ranks, or load the same weights on every rank."
)


def check_replicas(
    tensors: Mapping[str, torch.Tensor],
    world: World,
    *,
    label: str,
    values: bool,
    trainable: Collection[str] | None = None,
    sums: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Raise unless all ranks have tensors with the same names, shapes, dtypes and values.

    Args:
        tensors: the tensors by name.
        world: the ranks that compare.
        label: the operation, for errors.
        values: whether to compare values in addition to names, shapes and dtypes.
        trainable: names of the trained parameters, which must be equal on all ranks.
        sums: checksums of the full tensors, if each rank has only shards now.

    Cost: one pass over every tensor, and two small all-reduces.

    Raises:
        ReplicaMismatchError: the ranks differ; the error shows the first difference.
    """
    if world.size == 1:
        return
    rows = {n: f"{tuple(t.shape)} {t.dtype}" for n, t in tensors.items()}
    if trainable is not None:
        rows |= {n: f"{row}, frozen" for n, row in rows.items() if n not in trainable}
    noun = "models that differ in structure"
    check_rows(rows, world, label=label, advice=_CREATED, noun=noun)
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
    """Raise unless all ranks have the same values, given equal names, shapes and dtypes.

    Raises:
        ReplicaMismatchError: the values differ; the error names the first tensor.
    """
    if world.size == 1 or not tensors:
        return
    if sums is None:
        key = sums_of(tensors.values(), world, label=label)
    else:
        key = torch.stack([sums[name] for name in tensors]).to(readable(world.device))
    if is_same_text(str(key.tolist()), world, label=label):
        return
    rows = [row.tolist() for row in all_gather_list(key, world, label=label)]
    tables = {
        rank: [f"{n}: checksum {c}" for n, c in zip(tensors, row, strict=True)]
        for rank, row in enumerate(rows)
    }
    refuse_difference(tables, "models that differ in values", advice)


def check_rows(
    rows: Mapping[str, str],
    world: World,
    *,
    label: str,
    advice: str,
    noun: str = "states that differ",
) -> None:
    """Raise unless all ranks have the same names and texts, in the same order.

    Cost: one all-reduce of six numbers. If the ranks differ, two all-gathers of the texts.

    Raises:
        ReplicaMismatchError: the ranks differ; the error shows the first difference.
    """
    text = "\n".join(f"{name}: {row}" for name, row in rows.items())
    if world.size > 1 and not is_same_text(text, world, label=label):
        texts = gather_text(text, world, label=label)
        tables = {rank: text.split("\n") for rank, text in enumerate(texts)}
        refuse_difference(tables, noun, advice)


def refuse_difference(
    tables: Mapping[int, Sequence[str]], noun: str, advice: str
) -> None:
    """Raise if the ranks' tables differ.

    Raises:
        ReplicaMismatchError: the error shows each rank's version of the first different row.
    """
    for place in range(max(map(len, tables.values()), default=0)):
        rows = {rank: [*t, "nothing"][min(place, len(t))] for rank, t in tables.items()}
        if len(set(rows.values())) > 1:
            lines = "\n".join(f"  rank {rank}: {row}" for rank, row in rows.items())
            msg = f"The ranks have {noun}; the first difference is:\n{lines}\n{advice}"
            raise ReplicaMismatchError(msg)


def check_sums(
    sums: Mapping[str, torch.Tensor],
    weight: Number,
    world: World,
    *,
    label: str,
    is_first: bool,
) -> None:
    """Raise unless a transform's `reduce` returned bitwise equal sums and weights on all ranks.

    Cost: one pass over every tensor and a small all-reduce, but only at the first call or in a
    checked world. Simulated ranks always compare, without a collective.

    Raises:
        ReplicaMismatchError: the ranks differ; the error shows the first difference.
    """
    simulation = world.connection.simulated
    if simulation is None and not (is_first or world.checked):
        return
    rows = {"the weight": f"{float(weight)!r}"}
    dense = {n: t for n, t in sums.items() if t.layout is torch.strided}
    rows |= {
        n: f"{format_tensor(t)}, checksum {int(checksum(t))}" for n, t in dense.items()
    }
    if simulation is None:
        check_rows(rows, world, label=label, advice=_SUMS)
        return
    lines = [f"{name}: {row}" for name, row in rows.items()]
    other = simulation.compare(label, lines)
    if other is not None:
        tables = dict(sorted([other, (world.rank, lines)]))
        refuse_difference(tables, f"different values in {label}", _SUMS)


_SUMS = (
    "From the transform's `reduce`, return grads.with_sums(sums, weight) with values that are"
    " bitwise equal on all ranks, such as results of af.all_reduce and af.all_gather."
)


def sums_of(
    tensors: Iterable[torch.Tensor], world: World, *, label: str
) -> torch.Tensor:
    """Return one checksum per tensor; for a sharded tensor, it covers all of its shards.

    With sharded tensors this call is a collective.
    """
    leaves = list(tensors)
    checksums = (checksum(tree.local(tensor)) for tensor in leaves)
    sums = torch.stack([tensor.to(readable(world.device)) for tensor in checksums])
    groups: dict[tuple[str, ...], list[int]] = {}
    for i, tensor in enumerate(leaves):
        groups.setdefault(tree.cut_axes(tensor), []).append(i)
    for axes, split in groups.items():
        if axes:
            copy = fold_axes(world).along(*axes)
            parts = torch.stack(all_gather_list(sums[split], copy, label=label))
            sums[split] = torch.stack([checksum(part) for part in parts.unbind(1)])
    return sums


_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
"""The integer dtype that views an element's bits as words; an 8-byte element is two words."""
_CHUNK = 1 << 15
"""Words per call on the CPU: few enough for the processor's cache and for one thread."""
_LARGE_CHUNK = 1 << 22
"""Words per call on other devices, where a call costs more."""


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Return a checksum that depends on every bit of a tensor and on the bit's position.

    The memory is read as integers (words). Each word is multiplied by an odd number for its
    position, modulo 2**64. Before the sum, the upper half of each product is mixed into its
    lower half. So the checksum changes if two
    elements are exchanged, or if opposite numbers are added to two elements.

    Cost: a few passes over the tensor, without a copy.
    """
    if tensor.is_meta:
        return torch.zeros((), dtype=torch.int64)
    plain = tensor.detach().resolve_conj().resolve_neg()
    plain = torch.view_as_real(plain) if plain.is_complex() else plain
    flat = plain.contiguous().reshape(-1)
    # a tensor of one element may have stride 2, which cannot be viewed as two words
    words = flat.as_strided(flat.shape, (1,)).view(_WORDS[flat.element_size()])
    length = _CHUNK if words.is_cpu else _LARGE_CHUNK
    factors = _odd(torch.arange(min(len(words), length), device=words.device))
    chunks = words.split(length)
    sums = [_mix_bits(chunk * factors[: len(chunk)]).sum() for chunk in chunks]
    if len(sums) == 1:
        return sums[0]
    factors = _odd(torch.arange(len(sums), device=words.device))
    return _mix_bits(torch.stack(sums) * factors).sum()


def _odd(places: torch.Tensor) -> torch.Tensor:
    """Return a pseudo-random odd number for each position."""
    numbers = (places + 1) * 0x1E3779B97F4A7C15
    numbers = _mix_bits(numbers) * 0x3F58476D1CE4E5B9
    return _mix_bits(numbers) | 1


def _mix_bits(numbers: torch.Tensor) -> torch.Tensor:
    return numbers ^ (numbers >> 32)


# Full tensors from sharded tensors; one collective gathers many tensors.


_MOST = 32 << 20
"""Bytes of full tensors that one collective gathers; a larger tensor is gathered alone."""


def gather_full(
    tensors: Mapping[str, torch.Tensor], world: World, *, label: str
) -> dict[str, torch.Tensor]:
    """Return full tensors: plain tensors as they are, and sharded tensors gathered."""
    full = dict(tensors)
    for group in by_calls(tensors, world, label=label):
        full |= group
    return full


def by_calls(
    tensors: Mapping[str, torch.Tensor], world: World, *, label: str
) -> Iterator[dict[str, torch.Tensor]]:
    """Gather sharded tensors; yield the full tensors of one collective at a time.

    All ranks must iterate to the end, because each step is a collective. The full tensors are
    on the world's device.

    Args:
        tensors: the tensors by name, the same on all ranks.
        world: the ranks with the shards.
        label: the operation, for errors.

    Law: the full tensors are bitwise equal to the tensors before sharding.

    Cost: for each axis, about one gather for every 32 MiB of full tensors of one dtype, and at
        most twice as many. A tensor that the user sharded differently uses torch's collectives.
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
        if name not in ours:  # sharded by the user
            with naming(label, world):
                full = tensor.full_tensor()
            yield {name: full}


def _in_turn(tensor: Any) -> bool:
    """Return whether a tensor is sharded as a `Layout` shards it: along the last axis first.

    If a dim is sharded along two axes, the shards along the last axis must have equal lengths.
    """
    placements = list(enumerate(tensor.placements))
    for place, placement in placements:
        if placement.is_replicate():
            continue
        if type(placement).__name__ not in ("Shard", "_StridedShard"):
            return False  # a DTensor of partial sums
        dim = placement.dim
        later = [i for i, other in placements[place + 1 :] if other.is_shard(dim)]
        count = math.prod(tensor.device_mesh.size(i) for i in later)
        even = tensor.shape[dim] % count == 0
        if getattr(placement, "split_factor", 1) != count or not even:
            return False
    return True


def _gather_groups(tensors: Mapping[str, Any]) -> Iterator[list[str]]:
    """Yield groups of tensor names; one collective gathers all tensors of a group."""
    groups: dict[Any, list[str]] = {}
    for name, tensor in tensors.items():
        groups.setdefault((tensor.dtype, tree.cut_axes(tensor)), []).append(name)
    for names in groups.values():
        size, group = 0, list[str]()
        for name in names:
            nbytes = tensors[name].numel() * tensors[name].element_size()
            if group and size + nbytes > _MOST:
                yield group
                size, group = 0, []
            group.append(name)
            size += nbytes
        yield group


def _gather_shards(
    tensors: Mapping[str, Any], world: World, label: str
) -> dict[str, torch.Tensor]:
    """Gather tensors of one dtype that are sharded along the same axes, axis by axis."""
    parts = {name: tree.local(tensor).detach() for name, tensor in tensors.items()}
    axes = tree.cut_axes(next(iter(tensors.values())))
    # a shard along "tp" is sharded again along "dp_shard"
    for i, axis in enumerate(axes):
        ranks, counts = world.along(axis), list[list[int]]()
        dims = {name: _dim(tensor, axis) for name, tensor in tensors.items()}
        for name, tensor in tensors.items():
            later = [a for a in axes[i + 1 :] if _dim(tensor, a) == dims[name]]
            num_parts = math.prod(world.along(inner).size for inner in later)
            counts.append(_chunks(tensor.shape[dims[name]] // num_parts, ranks.size))
        rows = [part.movedim(dims[n], 0).to(ranks.device) for n, part in parts.items()]
        full = all_gather_rows(rows, counts, ranks, label=label)
        pairs = zip(parts, full, strict=True)
        parts = {n: t.movedim(0, dims[n]).contiguous() for n, t in pairs}
    return parts


def _chunks(length: int, count: int) -> list[int]:
    """Return the lengths of the parts into which `torch.chunk` splits, filled up with 0."""
    room = -(-length // count)
    return [min(max(length - i * room, 0), room) for i in range(count)]


def _dim(tensor: Any, axis: str) -> int:
    """Return the dim that is sharded along an axis."""
    place = tensor.device_mesh.mesh_dim_names.index(axis)
    return tensor.placements[place].dim
