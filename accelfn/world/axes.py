# SPDX-License-Identifier: Apache-2.0
"""Axes of a device mesh, with one axis for each kind of parallelism.

This module only computes with sizes and ranks. The outermost axis comes first. Ranks along
the last axis have consecutive numbers, because they communicate most, as in torchtitan and
Accelerate.
"""

import difflib
import math
from collections.abc import Collection, Mapping, Sequence
from itertools import combinations
from typing import Any

from accelfn.base.arguments import is_integer
from accelfn.errors import ArgumentError

AXES: Mapping[str, str] = {
    "dp_replicate": "copies of the model, each on its own samples",
    "dp_shard": "the ranks of one copy, which is usually sharded, each on its own samples",
    "cp": "parts of one sample's sequence",
    "tp": "parts of one layer",
}
"""The axes, outermost first, and what each rank along an axis has."""
VARIABLE = "ACCELFN_AXES"
"""The environment variable with the axes as text, which `accelfn launch --axes` sets."""
BATCH = ("dp_replicate", "dp_shard")
LOSS = ("dp_replicate", "dp_shard", "cp")


def resolve_axes(call: str, axes: object, size: int) -> dict[str, int]:
    """Check axes; return the size of each axis, outermost first, with -1 replaced.

    Raises:
        ArgumentError: an axis is unknown, a size is invalid, two sizes are -1, or the product
            is not the world's size.
    """
    if not isinstance(axes, Mapping):
        msg = f'{call}(axes={axes!r}): expected sizes by name, as in {{"dp_shard": 4}}.'
        raise ArgumentError(msg)
    return _fill_in(f"{call}(axes={axes!r})", axes, size)


def parse_axes(word: str, text: str, size: int | None) -> dict[str, int]:
    """Parse axes from a text such as `dp_replicate=2,dp_shard=4`.

    Args:
        word: the option or variable with the text, for errors.
        text: names and sizes.
        size: the world's size; None if unknown, then -1 is kept.

    Raises:
        ArgumentError: the text has another form, a name occurs twice, or `resolve_axes` would
            raise.
    """
    sizes: dict[str, int | str] = {}
    for part in text.split(","):
        name, equals, extent = (piece.strip() for piece in part.partition("="))
        if not name or not equals or name in sizes:
            msg = (
                f"{word}: expected sizes by name, each name once, such as"
                " dp_replicate=2,dp_shard=4."
            )
            raise ArgumentError(msg)
        is_number = extent.removeprefix("-").isdecimal()
        sizes[name] = int(extent) if is_number else extent
    return _fill_in(word, sizes, size)


def choose_axes(call: str, axes: object, text: str | None, size: int) -> dict[str, int]:
    """Return the axes that the script or its launcher sets; {} if neither sets axes.

    Raises:
        ArgumentError: script and launcher set different axes, or `resolve_axes` raises.
    """
    script_axes = {} if axes is None else resolve_axes(call, axes, size)
    if not text:
        return script_axes
    launch_axes = parse_axes(f"{VARIABLE}={text}", text, size)
    if axes is None:
        return launch_axes
    differing = script_axes.items() ^ launch_axes.items()
    if any(extent > 1 for _, extent in differing):
        msg = (
            f"{call}(axes={axes!r}) and {VARIABLE}={text}, which `accelfn launch --axes`"
            " sets, name different axes. Remove one of the two."
        )
        raise ArgumentError(msg)
    return script_axes


def _fill_in(call: str, axes: Mapping[Any, Any], size: int | None) -> dict[str, int]:
    """Return sizes as `resolve_axes` does; if the world's size is None, -1 is kept."""
    sizes: dict[str, int] = dict(axes)
    for name, extent in sizes.items():
        if (name, extent) == ("pp", 1):
            continue
        check_name(call, name)
        if not is_integer(extent, 1) and extent != -1:
            msg = f"{call}: {name!r} is {extent!r}; expected a number of ranks, 1 or more, or -1."
            raise ArgumentError(msg)
    free = [name for name, extent in sizes.items() if extent == -1]
    factor = math.prod(extent for extent in sizes.values() if extent != -1)
    if len(free) > 1:
        msg = f"{call}: only one axis can have the size -1, which means the remaining ranks."
        raise ArgumentError(msg)
    if size is not None:
        if free and size % factor == 0:
            sizes[free[0]] = size // factor
        if math.prod(sizes.values()) != size:
            product = " x ".join(str(extent) for extent in sizes.values()) or "none"
            msg = (
                f"{call}: the product of the sizes, {product}, is not the number of ranks,"
                f" {size}. Set one size to -1, or start another number of ranks."
            )
            raise ArgumentError(msg)
    return {name: sizes[name] for name in AXES if name in sizes}


def extents(call: str, axes: object) -> dict[str, int]:
    """Return the sizes of axes without -1, outermost first.

    Raises:
        ArgumentError: an axis is unknown, or a size is invalid.
    """
    values = dict(axes).values() if isinstance(axes, Mapping) else ()
    if -1 in values:
        msg = (
            f"{call}(axes={axes!r}): expected a number of ranks for each axis. -1 (the"
            " remaining ranks) is not possible here, because there is no world yet."
        )
        raise ArgumentError(msg)
    return resolve_axes(call, axes, math.prod(n for n in values if is_integer(n, 1)))


def fold_cp(axes: Mapping[str, int]) -> dict[str, int]:
    """Return the axes that may shard a model, with "cp" merged into "dp_shard"."""
    sizes = {name: axes[name] for name in axes if name != "cp"}
    if axes.get("cp", 1) > 1:
        sizes["dp_shard"] = axes.get("dp_shard", 1) * axes["cp"]
    return {name: sizes[name] for name in AXES if name in sizes}


def rows(axes: Mapping[str, int], names: Sequence[str]) -> list[tuple[int, ...]]:
    """Return all groups of ranks whose coordinates differ only along these axes."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(math.prod(axes.values())):
        cell = place(axes, rank)
        key = tuple(at for name, at in cell.items() if name not in names)
        groups.setdefault(key, []).append(rank)
    return [tuple(ranks) for ranks in groups.values()]


def check_name(call: str, name: object) -> None:
    """Raise unless a name is an axis.

    Raises:
        ArgumentError: the name is unknown; the message suggests the most similar axis.
    """
    if name == "pp":
        msg = (
            f'{call}: accelfn does not support pipeline parallelism ("pp"). Split the parameters'
            ' along "dp_shard", or sequences along "cp".'
        )
        raise ArgumentError(msg)
    if name not in AXES:
        matches = difflib.get_close_matches(str(name), AXES, n=1, cutoff=0.4)
        meant = f" Did you mean {matches[0]!r}?" if matches else ""
        msg = f"{call}: {name!r} is not an axis; the axes are {', '.join(AXES)}.{meant}"
        raise ArgumentError(msg)


def row(axes: Mapping[str, int], names: Sequence[str], rank: int) -> tuple[int, ...]:
    """Return the group of a rank: the ranks whose coordinates differ only along these axes."""
    if not names:
        return (rank,)
    return next(ranks for ranks in rows(axes, names) if rank in ranks)


def place(axes: Mapping[str, int], rank: int) -> dict[str, int]:
    """Return a rank's coordinate along each axis."""
    coordinates: dict[str, int] = {}
    for name, extent in reversed(tuple(axes.items())):
        rank, coordinates[name] = divmod(rank, extent)
    return {name: coordinates[name] for name in axes}


def long(
    axes: Mapping[str, int], names: Collection[str] | None = None
) -> tuple[str, ...]:
    """Return all axes or the named axes, without axes of one rank, outermost first."""
    names = axes if names is None else names
    return tuple(name for name in axes if name in names and axes[name] > 1)


def neighbor_runs(axes: Mapping[str, int]) -> list[tuple[str, ...]]:
    """Return every sequence of neighboring axes, except the sequence of all axes.

    Axes with one rank are left out.
    """
    names = long(axes)
    pairs = combinations(range(len(names) + 1), 2)
    return [names[begin:end] for begin, end in pairs if end - begin < len(names)]
