# SPDX-License-Identifier: Apache-2.0
"""Collectives on trees of tensors: dicts, lists, tuples, dataclasses and attrs records of them.

Nothing given is changed, and no result shares memory with it. A world of 1 gives the shapes that
a world of N does.
"""

import math
import pickle as _pickle
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import accumulate, islice, pairwise
from numbers import Number as AnyNumber
from typing import Any, TypeAlias, TypeVar, cast

import torch
import torch.distributed as dist

from accelfn.base import codec, tree
from accelfn.base.arguments import Number, explain_call_errors, is_integer
from accelfn.base.devices import readable
from accelfn.base.tree import Pending
from accelfn.collectives.failures import check_same_call, check_world, naming
from accelfn.collectives.packed import (
    all_gather,
    all_gather_rows,
    as_floats,
    average_,
    broadcast_,
    broadcast_bytes,
    check_reducible,
    check_stand_ins,
    check_weight,
    gather_bytes,
    gather_with_grad,
    in_default_floats,
    pack,
    reduce_same,
    scatter_bytes,
    split_vector,
    start_reduce_same,
    uneven_counts,
    warn_of_parts,
)
from accelfn.errors import ArgumentError, CollectiveMismatchError, PlainDataError
from accelfn.world import World

T = TypeVar("T")


@explain_call_errors
def gather(values: T, world: World, *, grad: bool = False, label: str = "gather") -> T:
    """Return every rank's tensors, joined along dim 0 in rank order, on all ranks.

    Args:
        values: a tree of tensors, of the same shapes and dtypes on all ranks. A scalar is a
            row: it becomes a vector with one element a rank.
        world: whose ranks take part.
        grad: whether the result is differentiated, any number of times: a rank's tensor then
            gets the sum of the gradients that all ranks have for its part, as a contrastive
            loss needs. All ranks give tensors that require gradients, or none does, and the
            loss of every rank uses each of the results: the backward pass is a collective.
        label: what the ranks are doing, for errors and logs.

    Law: with equal parts, splitting the result gives them back. Gradients, of any order, are
    those that one process has of the sum of all ranks' losses.

    Cost: one all-gather a dtype; with `grad`, one a tensor, and an all-reduce in the backward
    pass.

    Raises:
        ArgumentError: a leaf is no dense tensor; see `gather_objects`.
    """
    return _gather_leaves(values, world, label, grad=grad, is_ragged=False)


def gather_ragged(
    values: T, world: World, *, grad: bool = False, label: str = "gather_ragged"
) -> T:
    """Return every rank's rows, joined along dim 0; ranks may have any numbers of them.

    Args:
        values: a tree of tensors; all but dim 0 is the same on all ranks.
        world: whose ranks take part.
        grad: whether the result is differentiated, as in `gather`.
        label: what the ranks are doing.

    Law: it is `gather` of what was padded, without the padding.

    Cost: one gather of the lengths, and one a dtype, of as many rows as the longest has.
    """
    return _gather_leaves(values, world, label, grad=grad, is_ragged=True)


def _gather_leaves(
    values: Any, world: World, label: str, *, grad: bool, is_ragged: bool
) -> Any:
    """Join rows; in a loss with uneven shares any number, and none of a stand-in."""
    rows = [_row(leaf) for leaf in tensors_of(values, label, world)]
    held = uneven_counts(world, label)
    is_ragged = is_ragged or held is not None
    kind = f"gather{'_ragged' * is_ragged}{'(grad=True)' * grad}"
    free = 0 if is_ragged else None
    ready = check_same_call(world, kind, label, values, free=free, grad=grad)
    if held is not None and not held[world.rank]:
        rows = [row[:0] for row in rows]
    counts = [[len(row)] * world.size for row in rows]
    if is_ragged and rows:
        mine = torch.tensor([len(row) for row in rows], device=readable(world.device))
        lengths = torch.stack(all_gather(mine, ready, label=label))
        counts = lengths.T.tolist()
    if not grad:
        joined = all_gather_rows(rows, counts, ready, label=label)
        return tree.with_leaves(values, joined)
    warn_of_parts(world)
    each = zip(rows, counts, strict=True)
    found = [gather_with_grad(row, n, (ready, world), label) for row, n in each]
    return tree.with_leaves(values, found)


def join_rows(values: T, counts: Sequence[int], world: World, *, label: str) -> T:
    """Return every rank's rows, joined; `counts` says how many each has of every tensor.

    Cost: one gather a dtype, of as many rows as the longest has.
    """
    rows = tensors_of(values, label, world)
    world = check_same_call(world, label, label, values, free=0)
    each = [counts] * len(rows)
    return tree.with_leaves(values, all_gather_rows(rows, each, world, label=label))


@explain_call_errors
def reduce(
    values: T,
    world: World,
    op: str = "sum",
    *,
    weight: Number | None = None,
    bucket_cap_mb: float | None = None,
    label: str = "reduce",
) -> T:
    """Return tensors combined over all ranks, element by element, on all ranks.

    Args:
        values: a tree of tensors, of the same shapes and dtypes on all ranks.
        world: whose ranks take part.
        op: "sum", "mean", "min", "max" or "product". A mean of integers is a float, added up
            in float64, and one of 16-bit floats is added up in float32; booleans are counted
            by a sum. Where a rank has NaN, the least and the greatest are NaN.
        weight: of this rank in a mean, 0 or more: how many samples or tokens its values are
            of. All ranks give one, or none does. Where all are 0, all count alike.
        bucket_cap_mb: of a mean by weight, the size of the buffer in which values cross, in
            MiB; None is one buffer for all of a dtype.
        label: what the ranks are doing.

    Law: a mean is that of the numbers, however large, and one by weight that of the samples;
    the others are as torch's own would be of one tensor.

    Cost: one all-reduce a dtype, of as many elements; by weight one for each buffer, and
    memory for one buffer beside the result.

    Raises:
        ArgumentError: another word, a leaf that is no tensor, complex numbers that are to
            be ordered or multiplied, or a weight of what is no mean.
    """
    leaves = tensors_of(values, label, world)
    check_reducible({leaf.dtype for leaf in leaves}, op)
    check_weight(op, weight, bucket_cap_mb)
    if op != "mean":
        check_stand_ins(f"af.reduce({op!r})", world)
    elif (held := uneven_counts(world, label)) is not None:
        count = held[world.rank]
        weight = weight if count and weight is not None else count
    if weight is not None:
        ready = check_same_call(world, "reduce by weight", label, values, op=op)
        means = [each.clone() for each in map(as_floats, leaves)]
        cap = bucket_cap_mb
        average_(means, weight, ready, label=label, bucket_cap_mb=cap)
        given = map(in_default_floats, leaves, means)
        return tree.with_leaves(values, given)
    ready = check_same_call(world, "reduce", label, values, op=op)
    return _by_dtype(values, leaves, lambda same: reduce_same(same, ready, op, label))


def start_reduce(
    values: Any, world: World, op: str = "sum", *, label: str = "reduce"
) -> Pending:
    """Begin what `reduce` does, and return at once; `wait()` of it gives the result.

    The values are taken as they are now, and may change from then on. What is pending may
    stand in a slot: `state.copy()`, `af.save` and whoever else reads the state waits for it,
    and so does a loop that ends, if its transform's `finalize` asks. All ranks begin their
    collectives in the same order; they may wait whenever they like.

    Args:
        values: a tree of tensors, of the same shapes and dtypes on all ranks.
        world: whose ranks take part.
        op: as `reduce`.
        label: what the ranks are doing.

    Law: the result is that of `reduce`, bitwise, whenever it is waited for.

    Cost: that of `reduce`, of which what the network takes goes on beside what the program
    does; memory of one more copy of the values until they have arrived.

    Raises:
        ArgumentError: as `reduce`.

    Example:
        >>> world = World.single(device="cpu")
        >>> pending = start_reduce(torch.ones(2), world)
        >>> pending.wait()
        tensor([1., 1.])
    """
    leaves = tensors_of(values, label, world)
    check_reducible({leaf.dtype for leaf in leaves}, op)
    check_stand_ins(f"af.start_reduce({op!r})", world)
    if op == "mean" and uneven_counts(world, label) is not None:
        return Pending.of(reduce(values, world, op, label=label))
    ready = check_same_call(world, "start_reduce", label, values, op=op)
    dtypes = dict.fromkeys(leaf.dtype for leaf in leaves)
    places = {
        dtype: [i for i, leaf in enumerate(leaves) if leaf.dtype == dtype]
        for dtype in dtypes
    }
    begun = {
        dtype: start_reduce_same([leaves[i] for i in at], ready, op, label)
        for dtype, at in places.items()
    }
    outline = tree.with_leaves(values, [None] * len(leaves))

    def finish() -> Any:
        found: dict[int, torch.Tensor] = {}
        for dtype, at in places.items():
            found.update(zip(at, begun[dtype](), strict=True))
        return tree.with_leaves(outline, [found[i] for i in range(len(found))])

    return Pending(finish)


def broadcast(values: T, world: World, *, root: int = 0, label: str = "broadcast") -> T:
    """Return the tensors that rank `root` has, on all ranks.

    Args:
        values: a tree of tensors, of the same shapes and dtypes on all ranks.
        world: whose ranks take part.
        root: the rank whose values count.
        label: what the ranks are doing.

    Law: once more changes nothing.

    Cost: one broadcast a dtype.
    """
    check_root("broadcast", root, world)
    leaves = tensors_of(values, label, world)
    ready = check_same_call(world, "broadcast", label, values, root=root)

    def given(same: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        flat = pack(same)
        broadcast_([flat], ready, label=label, root=root)
        return split_vector(flat, same)

    return _by_dtype(values, leaves, given)


def pad_across(
    values: T,
    world: World,
    *,
    dim: int = 0,
    value: float = 0,
    first: bool = False,
    label: str = "pad_across",
) -> T:
    """Return tensors as long in one dimension as the longest that any rank has.

    Args:
        values: a tree of tensors; all but one dimension is the same on all ranks.
        world: whose ranks take part.
        dim: which dimension; a negative one counts from the last.
        value: what fills it up.
        first: whether filling comes before the values.
        label: what the ranks are doing.

    Cost: one gather of the lengths.

    Raises:
        ArgumentError: a tensor has no such dimension, or its dtype cannot hold the value.
    """
    leaves = tensors_of(values, label, world)
    for leaf in leaves:
        if not is_integer(dim) or not -leaf.ndim <= dim < leaf.ndim:
            msg = f"af.pad_across(dim={dim!r}): a tensor has the shape {tuple(leaf.shape)}."
            raise ArgumentError(msg)
        _check_holds(leaf.dtype, value)
    world = check_same_call(world, "pad_across", label, values, free=dim)
    if not leaves:
        return tree.with_leaves(values, [])
    mine = torch.tensor(
        [leaf.shape[dim] for leaf in leaves], device=readable(world.device)
    )
    longest = torch.stack(all_gather(mine, world, label=label)).amax(0).tolist()

    def padded(leaf: torch.Tensor, size: int) -> torch.Tensor:
        missing = list(leaf.shape)
        missing[dim] = size - leaf.shape[dim]
        filling = leaf.new_full(missing, value)
        return torch.cat([filling, leaf] if first else [leaf, filling], dim)

    return tree.with_leaves(values, map(padded, leaves, longest))


def _check_holds(dtype: torch.dtype, value: Any) -> None:
    """Raise unless a dtype has the value; a float may be rounded, but not to infinity."""
    holds = False
    if isinstance(value, AnyNumber):
        with suppress(RuntimeError, ValueError, OverflowError):  # those of torch
            held = torch.full((), cast("Any", value), dtype=dtype).item()
            holds = held == value or str(held) == str(
                value
            )  # NaN is not equal to itself
            if dtype.is_floating_point or dtype.is_complex:
                holds = holds or abs(cast("Any", value)) <= torch.finfo(dtype).max
    if not holds:
        msg = f"af.pad_across(value={value!r}): a tensor of {dtype} cannot hold it."
        raise ArgumentError(msg)


def any_rank(flag: object, world: World, *, label: str = "any_rank") -> bool:
    """Return whether the flag is true on any rank, the same on all.

    Raises:
        ArgumentError: it is neither true nor false, as a tensor of several elements is not.
    """
    check_world("af.any_rank", world)
    value = torch.tensor(int(_truth(flag, label)), device=readable(world.device))
    ready = check_same_call(world, "reduce", label, value, op="max")
    return bool(reduce_same([value], ready, "max", label)[0])


def all_ranks(flag: object, world: World, *, label: str = "all_ranks") -> bool:
    """Return whether the flag is true on every rank, the same on all.

    Raises:
        ArgumentError: as `any_rank`.
    """
    return not any_rank(not _truth(flag, label), world, label=label)


def _truth(flag: object, label: str) -> bool:
    try:
        return bool(flag)
    except (RuntimeError, ValueError, TypeError) as error:  # torch, numpy, anything
        msg = f"{label}: the flag is neither true nor false: {error}"
        raise ArgumentError(msg) from error


def check_root(name: str, root: int, world: World) -> None:
    """Raise unless there is such a rank.

    Raises:
        ArgumentError: there is none, or no world.
    """
    check_world(f"af.{name}", world)
    if not is_integer(root, 0) or root >= world.size:
        msg = f"af.{name}(root={root!r}): expected a rank from 0 to {world.size - 1}."
        raise ArgumentError(msg)


def tensors_of(values: Any, label: str, world: World) -> list[torch.Tensor]:
    """Return the leaves of a tree, in an order that all ranks have.

    Raises:
        ArgumentError: one is no tensor, or none whose elements lie in memory one by one.
    """
    leaves = tree.leaves_by_key(values)
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor):
            msg = (
                f"{label}: a leaf is a {type(leaf).__name__}; expected tensors. Objects"
                " travel by af.gather_objects and af.broadcast_object; those that are neither"
                " plain data nor tensors with pickle=True."
            )
            raise ArgumentError(msg)
        _check_dense(leaf, label, world)
    return leaves


def _check_dense(leaf: torch.Tensor, label: str, world: World) -> None:
    is_valueless = leaf.is_meta and world.device.type != "meta"
    if leaf.layout is torch.strided and not (
        is_valueless or leaf.is_quantized or leaf.is_nested
    ):
        return
    kind = str(leaf.layout).removeprefix("torch.")
    for name in ("meta", "quantized", "nested"):
        kind = name if getattr(leaf, f"is_{name}") else kind
    msg = (
        f"{label}: a leaf is a {kind} tensor, and only dense ones with values travel. Give its"
        " parts, or to_dense() or dequantize() of it."
    )
    raise ArgumentError(msg)


def _by_dtype(
    values: Any,
    leaves: Sequence[torch.Tensor],
    how: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]],
) -> Any:
    """Return the tree with what `how` gives for its leaves, those of a dtype at a time."""
    dtypes = dict.fromkeys([leaf.dtype for leaf in leaves])
    if len(dtypes) == 1:
        return tree.with_leaves(values, how(leaves))
    found: dict[int, torch.Tensor] = {}
    for dtype in dtypes:
        places = [i for i, leaf in enumerate(leaves) if leaf.dtype == dtype]
        found.update(zip(places, how([leaves[i] for i in places]), strict=True))
    return tree.with_leaves(values, [found[i] for i in range(len(leaves))])


def _row(leaf: torch.Tensor) -> torch.Tensor:
    """Return a tensor with a dim 0."""
    return leaf if leaf.ndim else leaf.reshape(1)


# Collectives on objects: plain data and tensors, as bytes.
#
# They travel as safetensors and JSON. Pickle, which runs code of whoever wrote it, is used
# where it is asked for by name.


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
    data = _serialize(value, pickle=pickle)
    world = check_same_call(world, _call_name("gather_objects", pickle=pickle), label)
    parts = gather_bytes(data, world, label=label)
    return [_deserialize(each, world, pickle=pickle) for each in parts]


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
    data = _serialize(value, pickle=pickle) if world.rank == root else None
    kind = _call_name("broadcast_object", pickle=pickle)
    world = check_same_call(world, kind, label, root=root)
    return _deserialize(
        broadcast_bytes(data, world, root=root, label=label), world, pickle=pickle
    )


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
    world = check_same_call(world, "scatter", label, root=root)
    data = scatter_bytes(parts, world, root=root, label=label)
    return _deserialize(data, world, pickle=False)


def _call_name(kind: str, *, pickle: bool) -> str:
    return f"{kind}(pickle=True)" if pickle else kind


_PICKLED = b"pickle"
_PLAIN = b"plain "
"""What bytes begin with: ranks that say different things of them must not read them."""


def _serialize(value: Any, *, pickle: bool) -> bytes:
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


def _deserialize(data: bytes, world: World, *, pickle: bool) -> Any:
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


# `all_to_all`: each rank has something for each, and gets what each has for it.


Shapes: TypeAlias = list[list[int]]


def all_to_all(
    values: Sequence[T],
    world: World,
    *,
    equal: bool = False,
    label: str = "all_to_all",
) -> list[T]:
    """Give each rank its own of the values; return what each rank gave this one.

    Args:
        values: a tree of tensors for each rank, in rank order. They have one structure, one
            dtype and one number of dimensions at each of its places, on all ranks; sizes may
            be any.
        world: whose ranks take part.
        equal: whether all ranks give all ranks tensors of the same shapes, which are then not
            exchanged first.
        label: what the ranks are doing.

    Returns: a list of trees, in rank order.

    Law: twice gives everything back; the same for all is `gather_objects`.

    Cost: one all-to-all of the sizes, unless they are equal, and one of the bytes, whatever
    the dtypes.

    Raises:
        ArgumentError: there is not one value for each rank, they are of several structures, a
            leaf is no tensor, or shapes that are said to be equal are not.
    """
    check_stand_ins("af.all_to_all", world)
    if not isinstance(values, (list, tuple)) or len(values) != world.size:
        count = len(values) if isinstance(values, Sequence) else type(values).__name__
        msg = (
            f"af.all_to_all: rank {world.rank} gave {count} values for {world.size} ranks;"
            " expected a list with one for each."
        )
        raise ArgumentError(msg)
    given = [tensors_of(each, label, world) for each in values]
    _check_alike(values)
    free = None if equal else ...
    world = check_same_call(world, "all_to_all", label, values[0], free=free)
    if world.size == 1 or not given[0]:
        return [tree.clone(each) for each in values]
    if equal:
        shapes = _equal(given)
        return _got(values[0], given, shapes, world, label)
    sizes = [[size for leaf in leaves for size in leaf.shape] for leaves in given]
    told = torch.tensor(sizes, dtype=torch.int64, device=readable(world.device))
    got = torch.empty_like(told)
    with naming(label, world):
        dist.all_to_all_single(got, told, group=world.group)
    shapes = [
        _split_sizes(row, [leaf.ndim for leaf in given[0]]) for row in got.tolist()
    ]
    return _got(values[0], given, shapes, world, label)


def _equal(given: list[list[torch.Tensor]]) -> list[Shapes]:
    """Return the shapes that all ranks are said to give this one: those that it gives."""
    shapes = [[list(leaf.shape) for leaf in leaves] for leaves in given]
    for rank, each in enumerate(shapes):
        if each != shapes[0]:
            msg = (
                f"af.all_to_all(equal=True): what is for rank 0 has the shapes {shapes[0]},"
                f" what is for rank {rank} {each}. Give tensors of the same shapes, or leave"
                " out equal."
            )
            raise ArgumentError(msg)
    return shapes


def _got(
    value: T,
    given: list[list[torch.Tensor]],
    shapes: list[Shapes],
    world: World,
    label: str,
) -> list[T]:
    """Return the trees that each rank gave this one, of these shapes."""
    parts = _exchange_bytes(given, shapes, world, label)
    return [
        _tree_from_bytes(value, given[0], row, part)
        for row, part in zip(shapes, parts, strict=True)
    ]


def _exchange_bytes(
    given: list[list[torch.Tensor]], shapes: list[Shapes], world: World, label: str
) -> Sequence[torch.Tensor]:
    """Return the bytes that each rank gave this one: tensors of these shapes."""
    sent = [torch.cat([_bytes(leaf) for leaf in leaves]) for leaves in given]
    coming = [sum(map(_num_bytes, given[0], row)) for row in shapes]
    got = sent[0].new_empty(sum(coming))
    leaving = [len(each) for each in sent]
    with naming(label, world):
        dist.all_to_all_single(got, torch.cat(sent), coming, leaving, group=world.group)
    return got.split(coming)


def _tree_from_bytes(
    value: T, leaves: list[torch.Tensor], shapes: Shapes, data: torch.Tensor
) -> T:
    """Return a tree like another, whose tensors have these shapes and bytes."""
    ends = accumulate(map(_num_bytes, leaves, shapes), initial=0)
    found = [
        data[begin:end].clone().view(leaf.dtype).view(shape)
        for leaf, shape, (begin, end) in zip(
            leaves, shapes, pairwise(ends), strict=True
        )
    ]
    return tree.with_leaves(value, found)


def _split_sizes(sizes: list[int], dims: list[int]) -> Shapes:
    rest = iter(sizes)
    return [list(islice(rest, ndim)) for ndim in dims]


def _bytes(leaf: torch.Tensor) -> torch.Tensor:
    plain = leaf.detach().resolve_conj().resolve_neg()
    return pack([plain]).view(torch.uint8)


def _num_bytes(leaf: torch.Tensor, shape: list[int]) -> int:
    return math.prod(shape) * leaf.element_size()


def _check_alike(values: Sequence[object]) -> None:
    first = tree.outline(values[0], _kind)
    for rank, each in enumerate(values):
        found = tree.outline(each, _kind)
        if found != first:
            msg = (
                "af.all_to_all: the values have one structure, and tensors of one dtype and"
                f" number of dimensions in each of its places; that for rank 0 is {first},"
                f" that for rank {rank} {found}."
            )
            raise ArgumentError(msg)


def _kind(leaf: torch.Tensor) -> str:
    return f"{leaf.ndim}-dim {leaf.dtype}"
