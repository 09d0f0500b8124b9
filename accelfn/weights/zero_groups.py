# SPDX-License-Identifier: Apache-2.0
"""Flat groups of ZeRO, put together from the parts of all ranks, by the parameters' names.

Stages 1 and 2 lay the parameters of a group one behind the other, padded, and each rank keeps
an equal part of that. Stage 3 cuts every parameter in as many flat parts as there are ranks, and
a rank lays its parts one behind the other. What an optimizer keeps lies as its weights do.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, cast

import torch

from accelfn.errors import CheckpointCorruptError
from accelfn.weights.pieces import Piece
from accelfn.weights.zero_parts import Part

_Place: TypeAlias = tuple[int, int, int]
"""A run of elements: the rank that has it, where it begins there, and how many they are."""


def shapes_of(said: Mapping[str, Iterable[int]]) -> dict[str, tuple[int, ...]]:
    """Return shapes by name as a file says them, in whatever kinds of integers and sequences."""
    return {str(name): tuple(map(int, shape)) for name, shape in said.items()}


def put_together(
    tag: Path, parts: Sequence[Part], said: Sequence[Mapping[str, Iterable[int]]]
) -> tuple[dict[str, Piece], dict[str, dict[str, Any]]]:
    """Return the weights and what the optimizer keeps of them, by the parameters' names.

    Raises:
        CheckpointCorruptError: groups, or their sizes, are not those of the model.
    """
    weights: dict[str, Piece] = {}
    entries: dict[str, dict[str, Any]] = {}
    for part in parts:
        if len(part.masters) != len(said):
            msg = (
                f"{part.file} has {len(part.masters)} groups, and the model's file names"
                f" {len(said)}: they are of different saves."
            )
            raise CheckpointCorruptError(msg)
    for index, group in enumerate(said):
        shapes = shapes_of(group)
        masters = [part.masters[index] for part in parts]
        sizes = [len(each) for each in masters]
        if parts[0].cuts_each:
            places = _cut_each(shapes, len(parts))
            wanted = [sum(-(-math.prod(s) // len(parts)) for s in shapes.values())]
            fits = sizes == wanted * len(parts)
        else:
            paddings = parts[0].paddings[index] if parts[0].paddings else ()
            places = _cut_across(shapes, sizes, paddings)
            # what is left behind the last is for alignment
            wanted = [sum(map(math.prod, shapes.values())) + sum(paddings)]
            fits = 0 <= sum(sizes) - wanted[0] < 2 * len(parts)
        if not fits:
            msg = (
                f"{tag}: ranks have {sizes} elements of group {index}, and its parameters,"
                f" {[*shapes][:3]} and so on, take {wanted[0]}: they are of different saves."
            )
            raise CheckpointCorruptError(msg)
        kept = [part.entries[index] for part in parts]
        for name, runs in places.items():
            weights[name] = _piece(shapes[name], masters, runs)
            found = _entry(tag, kept, sizes, shapes[name], runs)
            if found:
                entries[name] = found
    return weights, entries


def _cut_across(
    shapes: Mapping[str, tuple[int, ...]],
    sizes: Sequence[int],
    paddings: Sequence[int],
) -> dict[str, list[_Place]]:
    """Return where parameters lie that are one behind the other, over all ranks."""
    places: dict[str, list[_Place]] = {}
    at = 0
    for index, (name, shape) in enumerate(shapes.items()):
        end = at + math.prod(shape)
        places[name] = []
        begin = 0
        for rank, size in enumerate(sizes):
            first, last = max(at, begin), min(end, begin + size)
            if first < last:
                places[name].append((rank, first - begin, last - first))
            begin += size
        at = end + (paddings[index] if paddings else 0)
    return places


def _cut_each(
    shapes: Mapping[str, tuple[int, ...]], num_ranks: int
) -> dict[str, list[_Place]]:
    """Return where parameters lie of which each rank has a part, padded to equal lengths."""
    places: dict[str, list[_Place]] = {}
    at = 0
    for name, shape in shapes.items():
        count = math.prod(shape)
        size = -(-count // num_ranks)
        own = [max(0, min(size, count - rank * size)) for rank in range(num_ranks)]
        places[name] = [(rank, at, length) for rank, length in enumerate(own)]
        at += size
    return places


def _piece(
    shape: tuple[int, ...], held: Sequence[torch.Tensor], places: Iterable[_Place]
) -> Piece:
    runs = [held[rank].narrow(0, begin, length) for rank, begin, length in places]
    return Piece.of_runs(shape, runs)


def _entry(
    tag: Path,
    kept: Sequence[Mapping[str, Any]],
    sizes: Sequence[int],
    shape: tuple[int, ...],
    places: Iterable[_Place],
) -> dict[str, Any]:
    """Return what an optimizer keeps of a parameter: parts of what is flat, and numbers.

    Raises:
        CheckpointCorruptError: ranks do not keep alike.
    """
    found: dict[str, Any] = {}
    for key, first in kept[0].items():
        values = [each.get(key) for each in kept]
        if isinstance(first, torch.Tensor) and first.ndim:
            for value, size in zip(values, sizes, strict=True):
                # an optimizer keeps the padding behind a group, too
                if getattr(value, "ndim", 0) != 1 or len(cast("Any", value)) < size:
                    shapes = [tuple(getattr(each, "shape", ())) for each in values]
                    msg = (
                        f"{tag}: of {key!r} ranks have {shapes}, and of the weights {sizes}:"
                        " an optimizer that keeps such is not read."
                    )
                    raise CheckpointCorruptError(msg)
            found[key] = _piece(shape, cast("list[torch.Tensor]", values), places)
        elif key == "step":
            step = torch.as_tensor(first, dtype=torch.float32)
            found[key] = Piece.of(step)
        else:
            found[key] = Piece.of(first) if isinstance(first, torch.Tensor) else first
    return found
