# SPDX-License-Identifier: Apache-2.0
"""`split`: each rank's part of a list, a tensor, or a dict of them."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar, cast

import numpy as np
import torch

from accelfn.base.calling import called
from accelfn.data.cut import even_part
from accelfn.errors import ArgumentError
from accelfn.world import World

T = TypeVar("T")


@called
def split(values: T, world: World, *, pad: bool = False) -> T:
    """Return this rank's part of values that all ranks hold: prompts, files, rows.

    Parts are contiguous, in rank order, and their lengths differ by at most one, longer
    ones first; a part may be empty. Nothing is communicated and nothing given is changed.

    Args:
        values: a list, tuple, string, bytes, range, tensor or array, or a dict of such of one
            length. A tensor's part is a view.
        world: says which rank this is; of a world with ranks that share their samples ("cp",
            "tp"), `world.batch`.
        pad: make all parts as long as the first, by repeating a part's last value, or the
            last of all where a part is empty. Those of a range are lists then.

    Raises:
        ArgumentError: ranks of the world share samples, a dict's values differ in length, there
            is nothing to repeat, or something is no sequence that can be sliced; a namedtuple
            is a record.

    Law: without `pad`, the parts of all ranks in rank order are the values; in a world of 1
    they are the very object.

    Example:
        >>> split(["a", "b", "c"], World.single())
        ['a', 'b', 'c']
    """
    _check_world(world)
    length = _length(values)
    if world.size == 1:
        return values
    start, stop = even_part((0, length), world.rank, world.size)
    longest = -(-length // world.size)
    if pad and length == 0:
        msg = "af.split(pad=True): there is nothing to repeat in empty values."
        raise ArgumentError(msg)
    places = list(range(start, stop))
    if pad:
        places += [max(stop, 1) - 1] * (longest - len(places))

    def part(each: Any) -> Any:
        if isinstance(each, Mapping):
            items = cast("Mapping[Any, Any]", each).items()
            return {name: part(inner) for name, inner in items}
        if pad and isinstance(each, range):  # a range cannot repeat its last value
            return [each[place] for place in places]
        if len(places) == stop - start:
            return each[start:stop]
        if isinstance(each, (torch.Tensor, np.ndarray)):
            return each[places]
        return _like(each[start:stop], [each[place] for place in places])

    return part(values)


def _check_world(world: object) -> None:
    """Refuse what is no world, and one of which not every rank has samples of its own."""
    if not isinstance(world, World):
        msg = f"af.split: expected an af.World, got {world!r}."
        raise ArgumentError(msg)
    if world.whole is world and world.batch is not world:
        sharers = [n for n in ("cp", "tp") if world.axes.get(n, 1) > 1]
        msg = (
            f"af.split: the ranks along {' and '.join(sharers)} share their samples, so they"
            " would be given parts of one another's. Give world.batch; or the axes that are"
            f" meant, such as world.along({sharers[0]!r})."
        )
        raise ArgumentError(msg)


def _like(part: Any, picked: list[Any]) -> Any:
    """Return the values that were picked as what a part of theirs is."""
    if isinstance(part, str):
        return "".join(picked)
    kind = {bytes: bytes, bytearray: bytearray, tuple: tuple}.get(type(part), list)
    return kind(picked)


def _length(values: Any) -> int:
    """Return how many values there are to split."""
    if isinstance(values, Mapping):
        items = cast("Mapping[Any, Any]", values).items()
        lengths = {name: _length(each) for name, each in items}
        if len(set(lengths.values())) > 1:
            msg = f"af.split: the values of this dict differ in length: {lengths}."
            raise ArgumentError(msg)
        return next(iter(lengths.values()), 0)
    shaped = isinstance(values, (torch.Tensor, np.ndarray)) and values.ndim > 0
    if not shaped and not _is_cut(values):
        msg = (
            f"af.split: expected a sequence that can be sliced, a tensor with a dim 0, or a"
            f" dict of them, got {type(values).__name__}."
        )
        raise ArgumentError(msg)
    return len(cast("Sequence[Any]", values))


def _is_cut(values: Any) -> bool:
    """Whether it is a sequence with parts: a deque has none, and a record's fields are none."""
    if not isinstance(values, Sequence) or hasattr(values, "_fields"):
        return False
    with suppress(TypeError):
        cast("Sequence[Any]", values)[0:0]
        return True
    return False
