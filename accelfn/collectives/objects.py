# SPDX-License-Identifier: Apache-2.0
"""Collectives on objects: plain data and tensors, as bytes.

They travel as safetensors and JSON. Pickle, which runs code of whoever wrote it, is used where it
is asked for by name.
"""

import pickle as _pickle
from collections.abc import Sequence
from typing import Any

from accelfn.base import codec
from accelfn.base.calling import called
from accelfn.collectives.agreed import agreed
from accelfn.collectives.packed import broadcast_bytes, gather_bytes, scatter_bytes
from accelfn.collectives.shares import check_stand_ins
from accelfn.collectives.trees import check_root
from accelfn.errors import ArgumentError, CollectiveMismatchError, PlainDataError
from accelfn.world import World


@called
def gather_objects(
    value: Any, world: World, *, pickle: bool = False, label: str = "gather_objects"
) -> list[Any]:
    """Return every rank's object in rank order, on all ranks.

    Args:
        value: tensors, strings, numbers, booleans, None, and dicts, lists and tuples of them;
            it may differ between ranks in everything.
        world: whose ranks take part.
        pickle: whether it is something else, and all ranks are to be trusted.
        label: what the ranks are doing.

    Cost: two gathers: of the lengths, and of as many bytes as the longest has.

    Raises:
        PlainDataError: it is something else, and `pickle` is False; or pickle refuses it.
        CollectiveMismatchError: not all ranks say `pickle=True`.
    """
    check_stand_ins("af.gather_objects", world)
    data = _written(value, pickle=pickle)
    world = agreed(world, _named("gather_objects", pickle=pickle), label)
    parts = gather_bytes(data, world, label=label)
    return [_read(each, world, pickle=pickle) for each in parts]


@called
def broadcast_object(
    value: Any,
    world: World,
    *,
    root: int = 0,
    pickle: bool = False,
    label: str = "broadcast_object",
) -> Any:
    """Return the object that rank `root` has, on all ranks; what others give is not looked at.

    Args, Raises: as `gather_objects`.

    Cost: two broadcasts: of the length, and of the bytes.
    """
    check_root("broadcast_object", root, world)
    data = _written(value, pickle=pickle) if world.rank == root else None
    kind = _named("broadcast_object", pickle=pickle)
    world = agreed(world, kind, label, root=root)
    return _read(
        broadcast_bytes(data, world, root=root, label=label), world, pickle=pickle
    )


@called
def scatter(
    values: Sequence[Any] | None, world: World, *, root: int = 0, label: str = "scatter"
) -> Any:
    """Return this rank's one of the values that rank `root` has, one for each rank.

    Args:
        values: on `root`, a tree of tensors and plain data for each rank, of any shapes; it
            is not looked at elsewhere.
        world: whose ranks take part.
        root: the rank that has them.
        label: what the ranks are doing.

    Law: gathering what was scattered gives it back.

    Cost: a broadcast of the lengths, and a scatter of as many bytes as the longest has.

    Raises:
        ArgumentError: it is no list or tuple with one value for each rank.
        PlainDataError: a value is neither a tensor nor plain data.
    """
    check_root("scatter", root, world)
    parts = None
    if world.rank == root:
        if not isinstance(values, (list, tuple)) or len(values) != world.size:
            count = len(values) if isinstance(values, (list, tuple)) else None
            given = type(values).__name__ if count is None else f"{count} values"
            msg = (
                f"af.scatter: rank {root} gave {given} for {world.size} ranks; expected a"
                " list or a tuple with one value for each."
            )
            raise ArgumentError(msg)
        parts = [_PLAIN + codec.to_bytes(each) for each in values]
    world = agreed(world, "scatter", label, root=root)
    data = scatter_bytes(parts, world, root=root, label=label)
    return _read(data, world, pickle=False)


def _named(kind: str, *, pickle: bool) -> str:
    return f"{kind}(pickle=True)" if pickle else kind


_PICKLED = b"pickle"
_PLAIN = b"plain "
"""What bytes begin with: ranks that say different things of them must not read them."""


def _written(value: Any, *, pickle: bool) -> bytes:
    if not pickle:
        try:
            return _PLAIN + codec.to_bytes(value)
        except PlainDataError as error:
            msg = f"{error} Or give pickle=True on all ranks, if all are to be trusted."
            raise PlainDataError(msg) from error
    try:
        return _PICKLED + _pickle.dumps(value)
    except Exception as error:  # whatever an object's own way of being pickled raises
        msg = (
            f"pickle=True: {type(value).__name__} cannot be pickled: {error}. Give what it is"
            " made of, and functions that a module has by name."
        )
        raise PlainDataError(msg) from error


def _read(data: bytes, world: World, *, pickle: bool) -> Any:
    kind, inside = data[: len(_PLAIN)], data[len(_PLAIN) :]
    if kind != (_PICKLED if pickle else _PLAIN):
        msg = (
            f"Rank {world.rank} of {world.size} was given an object that was sent with"
            f" pickle={not pickle}, and reads with pickle={pickle}. Give the same on all"
            " ranks."
        )
        raise CollectiveMismatchError(msg)
    if pickle:
        return _pickle.loads(inside)  # noqa: S301 - asked for by name
    return codec.from_bytes(inside, str(world.device))
