# SPDX-License-Identifier: Apache-2.0
"""Replicas: ranks that should hold the same tell one another checksums of it."""

from collections.abc import Collection, Iterable, Mapping, Sequence

import torch

from accelfn.base import shards
from accelfn.base.arguments import Number
from accelfn.base.valueless import readable
from accelfn.collectives.calls import shown
from accelfn.collectives.packed import all_gather, are_told_alike, gather_text
from accelfn.errors import ReplicaMismatchError
from accelfn.world import World
from accelfn.world.folding import folded

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
    if are_told_alike(str(mine.tolist()), world, label=label):
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
    if are_told_alike(said, world, label=label):
        return []
    return [text.split("\n") for text in gather_text(said, world, label=label)]


def first_difference(tables: Sequence[Sequence[str]]) -> str | None:
    """Return the first row that is not the same in all ranks' tables, a line a rank."""
    found = _first_difference(tables)
    return None if found is None else _listed(found[1])


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
    rows |= {n: f"{shown(t)}, checksum {int(checksum(t))}" for n, t in dense.items()}
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
            f" that differs:\n{_listed(rows)}\n{advice}"
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


def _listed(rows: Sequence[str]) -> str:
    return "\n".join(f"  rank {rank}: {row}" for rank, row in enumerate(rows))


def sums_of(
    tensors: Iterable[torch.Tensor], world: World, *, label: str
) -> torch.Tensor:
    """Return checksums: of a tensor that is split, that of all parts of this rank's copy.

    Where a rank has a part it is a collective.
    """
    listed = list(tensors)
    here = (checksum(shards.local(tensor)) for tensor in listed)
    sums = torch.stack([each.to(readable(world.device)) for each in here])
    alike: dict[tuple[str, ...], list[int]] = {}
    for i, tensor in enumerate(listed):
        alike.setdefault(shards.cut_axes(tensor), []).append(i)
    for axes, split in alike.items():
        if axes:
            copy = folded(world).along(*axes)
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
    sums = [_mixed(each * factors[: len(each)]).sum() for each in chunks]
    if len(sums) == 1:
        return sums[0]
    each = _odd(torch.arange(len(sums), device=words.device))
    return _mixed(torch.stack(sums) * each).sum()


def _odd(places: torch.Tensor) -> torch.Tensor:
    """Return an odd number for each place; they look as if drawn."""
    drawn = (places + 1) * 0x1E3779B97F4A7C15
    drawn = _mixed(drawn) * 0x3F58476D1CE4E5B9
    return _mixed(drawn) | 1


def _mixed(numbers: torch.Tensor) -> torch.Tensor:
    return numbers ^ (numbers >> 32)
