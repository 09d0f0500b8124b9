# SPDX-License-Identifier: Apache-2.0
"""Collectives on trees of tensors: dicts, lists, tuples, dataclasses, attrs records.

A collective does not change its arguments, and no result shares memory with them. A world of
one rank returns the same shapes as a world of many ranks.
"""

import math
import pickle as _pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import chain, islice
from numbers import Number as AnyNumber
from typing import Any, Literal, TypeAlias, TypeVar, cast

import torch
import torch.distributed as dist

from accelfn.base import codec, tree
from accelfn.base.arguments import Number, advise, explain_call_errors, is_integer
from accelfn.base.devices import readable
from accelfn.base.tree import Pending
from accelfn.collectives import packed
from accelfn.collectives.failures import check_same_call, check_world, naming
from accelfn.errors import ArgumentError, CollectiveMismatchError, PlainDataError
from accelfn.world import World

T = TypeVar("T")
Op: TypeAlias = Literal["sum", "mean", "min", "max", "product"]


@explain_call_errors
def all_gather(
    values: T,
    world: World,
    *,
    ragged: bool = False,
    grad: bool = False,
    label: str = "all_gather",
) -> T:
    """Concatenate every rank's tensors along dim 0, in rank order, on all ranks.

    Args:
        values: a tree of tensors, with the same shapes and dtypes on all ranks. A scalar on
            each rank becomes a vector with one element per rank.
        world: the ranks that take part.
        ragged: whether ranks may have different numbers of rows; the other dims are equal.
        grad: whether the result has gradients, also of higher order, as a contrastive loss
            needs. The gradient of a rank's tensor is the sum over all ranks of the gradients
            of its rows. Either all ranks or no rank may pass tensors that require gradients,
            and every rank's loss must use each result, because the backward pass is a
            collective.
        label: the operation, for errors and logs.

    Law: splitting the result by rank returns every rank's values. Gradients of any order are
    equal to those of one process for the sum of all ranks' losses.

    Cost: one all-gather per dtype. With `ragged`, also one all-gather of the lengths, and
    tensors are padded to the longest rank. With `grad`, one all-gather per tensor, and an
    all-reduce in the backward pass.

    Raises:
        ArgumentError: a leaf is not a dense tensor; for objects use `all_gather_objects`.
    """
    leaves = tensors_of(values, label, world)
    rows = [leaf if leaf.ndim else leaf.reshape(1) for leaf in leaves]
    num_samples = packed.uneven_counts(world, label)
    if not grad:
        _warn_of_lost_gradients(leaves, label, world)
    # in a loss with uneven shares, ranks have different numbers of rows
    is_ragged = ragged or num_samples is not None
    kind = f"all_gather{'(ragged=True)' * is_ragged}{'(grad=True)' * grad}"
    free = 0 if is_ragged else None
    ready = check_same_call(world, kind, label, values, free=free, grad=grad)
    if num_samples is not None and not num_samples[world.rank]:
        rows = [row[:0] for row in rows]  # drop the rows of filler samples
    counts = [[len(row)] * world.size for row in rows]
    if is_ragged and rows:
        sizes = torch.tensor([len(row) for row in rows], device=readable(world.device))
        lengths = torch.stack(packed.all_gather_list(sizes, ready, label=label))
        counts = lengths.T.tolist()
    if not grad:
        tensors = packed.all_gather_rows(rows, counts, ready, label=label)
        return tree.with_leaves(values, tensors)
    packed.warn_of_parts(world, label)
    pairs = zip(rows, counts, strict=True)
    tensors = [
        packed.gather_with_grad(row, n, (ready, world), label) for row, n in pairs
    ]
    return tree.with_leaves(values, tensors)


def join_rows(values: T, counts: Sequence[int], world: World, *, label: str) -> T:
    """Concatenate the rows of every rank; rank r has `counts[r]` rows of every tensor.

    Cost: one gather per dtype, with tensors padded to the longest rank.
    """
    rows = tensors_of(values, label, world)
    world = check_same_call(world, label, label, values, free=0)
    tensors = packed.all_gather_rows(rows, [counts] * len(rows), world, label=label)
    return tree.with_leaves(values, tensors)


@explain_call_errors
def all_reduce(
    values: T,
    world: World,
    op: Op = "sum",
    *,
    weight: Number | None = None,
    bucket_cap_mb: float | None = None,
    label: str = "all_reduce",
) -> T:
    """Reduce tensors over all ranks, element by element; all ranks get the result.

    The result has no gradient. For a gradient use `all_gather(grad=True)`.

    Args:
        values: a tree of tensors, with the same shapes and dtypes on all ranks.
        world: the ranks that take part.
        op: "sum", "mean", "min", "max" or "product". A mean of integers is a float and is
            computed in float64; a mean of 16-bit floats is computed in float32. A sum of
            booleans counts True. Minimum and maximum are NaN if any rank has NaN.
        weight: this rank's weight in a mean, 0 or more, such as its number of samples or
            tokens. Either all ranks or no rank may pass a weight. If all weights are 0, the
            result is the unweighted mean.
        bucket_cap_mb: the size in MiB of the buffers of a weighted mean; None uses one buffer
            per dtype.
        label: the operation, for errors and logs.

    Law: a mean is exact also for large numbers. With numbers of samples as weights, it is the
    mean over all samples. Other results are equal to torch's all-reduce.

    Cost: one all-reduce per dtype. With a weight, one all-reduce per buffer, and memory for one
    buffer.

    Raises:
        ArgumentError: `op` is unknown or not possible for complex numbers, a leaf is not a
            tensor, or a weight is passed and `op` is not "mean".
    """
    leaves = tensors_of(values, label, world)
    packed.check_reducible({leaf.dtype for leaf in leaves}, op)
    packed.check_weight(op, weight, bucket_cap_mb)
    if op != "mean":
        packed.check_stand_ins(f"af.all_reduce({op!r})", world)
    elif (counts := packed.uneven_counts(world, label)) is not None:
        count = counts[world.rank]
        weight = weight if count and weight is not None else count
    _warn_of_lost_gradients(leaves, label, world)
    if op == "mean":
        packed.warn_of_parts(world, label)
    if weight is not None:
        ready = check_same_call(world, "all_reduce by weight", label, values, op=op)
        means = [mean.clone() for mean in map(packed.as_floats, leaves)]
        cap = bucket_cap_mb
        packed.average_(means, weight, ready, label=label, bucket_cap_mb=cap)
        results = map(packed.in_default_floats, leaves, means)
        return tree.with_leaves(values, results)
    ready = check_same_call(world, "all_reduce", label, values, op=op)
    return _start_by_dtype(values, leaves, ready, op, label)()


def start_all_reduce(
    values: Any, world: World, op: Op = "sum", *, label: str = "all_reduce"
) -> Pending:
    """Start an `all_reduce`, and return a `Pending`; its method `wait()` returns the result.

    You may change the values after the call. You can keep the `Pending` in a slot:
    `state.copy()`, `af.save` and all other readers of the state wait for its result, and a
    transform's `finalize` can wait at the end of a loop. All ranks must start their
    collectives in the same order, but may wait at any time.

    Args:
        values: a tree of tensors, with the same shapes and dtypes on all ranks.
        world: the ranks that take part.
        op: the reduction, as in `all_reduce`.
        label: the operation, for errors and logs.

    Law: the result is bitwise equal to the result of `all_reduce`.

    Cost: the same as `all_reduce`, but the program continues meanwhile; memory for one copy of
    the values until the result arrives.

    Raises:
        ArgumentError: in the same cases as `all_reduce`.

    Example:
        >>> world = World.single(device="cpu")
        >>> pending = start_all_reduce(torch.ones(2), world)
        >>> pending.wait()
        tensor([1., 1.])
    """
    leaves = tensors_of(values, label, world)
    packed.check_reducible({leaf.dtype for leaf in leaves}, op)
    packed.check_stand_ins(f"af.start_all_reduce({op!r})", world)
    _warn_of_lost_gradients(leaves, label, world)
    if op == "mean" and packed.uneven_counts(world, label) is not None:
        return Pending.of(all_reduce(values, world, op, label=label))
    ready = check_same_call(world, "start_all_reduce", label, values, op=op)
    return Pending(_start_by_dtype(values, leaves, ready, op, label))


def _start_by_dtype(
    values: Any, leaves: Sequence[torch.Tensor], world: World, op: str, label: str
) -> Callable[[], Any]:
    """Start one reduction per dtype; return a function that returns a tree of the results."""
    places = packed.places_by_dtype(leaves).values()
    waits = [
        packed.start_reduce_same([leaves[i] for i in at], world, op, label)
        for at in places
    ]
    outline = tree.with_leaves(values, [None] * len(leaves))
    order = [*chain.from_iterable(places)]

    def finish() -> Any:
        tensors = chain.from_iterable(wait() for wait in waits)
        results = dict(zip(order, tensors, strict=True))
        return tree.with_leaves(outline, [results[i] for i in range(len(results))])

    return finish


def broadcast(values: T, world: World, *, root: int = 0, label: str = "broadcast") -> T:
    """Send the tensors of rank `root` to all ranks, and return them.

    Args:
        values: a tree of tensors, with the same shapes and dtypes on all ranks.
        world: the ranks that take part.
        root: the rank that sends its values.
        label: the operation, for errors and logs.

    Law: a broadcast of the result returns the same values.

    Cost: one broadcast per dtype.
    """
    check_root("broadcast", root, world)
    leaves = tensors_of(values, label, world)
    ready = check_same_call(world, "broadcast", label, values, root=root)
    _warn_of_lost_gradients(leaves, label, world)
    copies = [packed.pack([leaf]).view(leaf.shape) for leaf in leaves]
    packed.broadcast_(copies, ready, label=label, root=root)
    return tree.with_leaves(values, copies)


def pad_across(
    values: T,
    world: World,
    *,
    dim: int = 0,
    value: float = 0,
    first: bool = False,
    label: str = "pad_across",
) -> T:
    """Pad tensors in one dim to the largest size that a rank has.

    Args:
        values: a tree of tensors; all dims except `dim` are equal on all ranks.
        world: the ranks that take part.
        dim: the dim to pad; a negative number counts from the last dim.
        value: the value of the padding.
        first: whether to pad at the start instead of the end.
        label: the operation, for errors and logs.

    Cost: one gather of the sizes.

    Raises:
        ArgumentError: a tensor has no such dim, or its dtype cannot represent the value.
    """
    leaves = tensors_of(values, label, world)
    for leaf in leaves:
        if not is_integer(dim) or not -leaf.ndim <= dim < leaf.ndim:
            shape = tuple(leaf.shape)
            msg = f"af.pad_across(dim={dim!r}): a tensor of shape {shape} has no such dim."
            raise ArgumentError(msg)
        _check_holds(leaf.dtype, value)
    world = check_same_call(world, "pad_across", label, values, free=dim)
    if not leaves:
        return tree.with_leaves(values, [])
    lengths = torch.tensor(
        [leaf.shape[dim] for leaf in leaves], device=readable(world.device)
    )
    by_rank = torch.stack(packed.all_gather_list(lengths, world, label=label))
    longest = by_rank.amax(0).tolist()

    def pad_leaf(leaf: torch.Tensor, size: int) -> torch.Tensor:
        missing = list(leaf.shape)
        missing[dim] = size - leaf.shape[dim]
        filling = leaf.new_full(missing, value)
        return torch.cat([filling, leaf] if first else [leaf, filling], dim)

    return tree.with_leaves(values, map(pad_leaf, leaves, longest))


def _check_holds(dtype: torch.dtype, value: Any) -> None:
    """Raise unless a dtype can represent a value; a float may be rounded, but not to infinity."""
    holds = False
    if isinstance(value, AnyNumber):
        # torch may reject the value
        with suppress(RuntimeError, ValueError, OverflowError):
            result = torch.full((), cast("Any", value), dtype=dtype).item()
            # also compared as text, because NaN is not equal to itself
            holds = result == value or str(result) == str(value)
            if dtype.is_floating_point or dtype.is_complex:
                holds = holds or abs(cast("Any", value)) <= torch.finfo(dtype).max
    if not holds:
        msg = f"af.pad_across(value={value!r}): tensors of {dtype} cannot contain this value."
        raise ArgumentError(msg)


def any_rank(flag: object, world: World, *, label: str = "any_rank") -> bool:
    """Return whether the flag is true on at least one rank; all ranks get the same result.

    Raises:
        ArgumentError: `bool(flag)` fails, for example for a tensor of several elements.
    """
    check_world("af.any_rank", world)
    value = torch.tensor(int(_truth(flag, label)), device=readable(world.device))
    ready = check_same_call(world, "all_reduce", label, value, op="max")
    return bool(packed.reduce_same([value], ready, "max", label)[0])


def all_ranks(flag: object, world: World, *, label: str = "all_ranks") -> bool:
    """Return whether the flag is true on every rank; all ranks get the same result.

    Raises:
        ArgumentError: `bool(flag)` fails, for example for a tensor of several elements.
    """
    return not any_rank(not _truth(flag, label), world, label=label)


def _truth(flag: object, label: str) -> bool:
    try:
        return bool(flag)
    except (RuntimeError, ValueError, TypeError) as error:  # of any class
        msg = f"{label}: expected True or False, but bool(flag) fails: {error}"
        raise ArgumentError(msg) from error


def check_root(name: str, root: int, world: World) -> None:
    """Raise unless `root` is a rank of the world.

    Raises:
        ArgumentError: `root` is not such a rank, or the world is not a World.
    """
    check_world(f"af.{name}", world)
    if not is_integer(root, 0) or root >= world.size:
        msg = f"af.{name}(root={root!r}): expected a rank from 0 to {world.size - 1}."
        raise ArgumentError(msg)


def tensors_of(values: Any, label: str, world: World) -> list[torch.Tensor]:
    """Return the tensors of a tree, in the same order on all ranks.

    Raises:
        ArgumentError: a leaf is not a dense tensor.
    """
    leaves = tree.leaves_by_key(values)
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor):
            msg = (
                f"{label}: the values contain a {type(leaf).__name__}, but this call can send only"
                " tensors. For other objects, use af.all_gather_objects or af.broadcast_object."
            )
            raise ArgumentError(msg)
        kind = codec.kind_of(leaf)
        if kind is not None and (kind, world.device.type) != ("meta", "meta"):
            msg = (
                f"{label}: the values contain a {kind} tensor, but this call can send only dense"
                " tensors with values. Call to_dense() or dequantize(), or pass its dense parts."
            )
            raise ArgumentError(msg)
    return leaves


def _warn_of_lost_gradients(
    leaves: Sequence[torch.Tensor], label: str, world: World
) -> None:
    """Warn if a loss passes tensors with gradients to a collective without gradients."""
    if world.connection.activity.samples is None or not torch.is_grad_enabled():
        return
    if any(leaf.requires_grad for leaf in leaves):
        advise(
            f"The loss calls the collective {label!r} with tensors that require gradients, but"
            " the result has no gradient. If you want the mean loss of all ranks, return this"
            " rank's loss: the step averages gradients over ranks. If you need a gradient, use"
            " af.all_gather(values, world, grad=True) and compute with its result. Otherwise pass"
            " values.detach()."
        )


# Collectives on objects: plain data and tensors.
#
# Objects are sent as bytes of safetensors and JSON. Pickle can run code from the sender, so it
# is used only with `pickle=True`.


def all_gather_objects(
    value: Any, world: World, *, pickle: bool = False, label: str = "all_gather_objects"
) -> list[Any]:
    """Return a list of every rank's object, in rank order, on all ranks.

    Args:
        value: a tensor, string, number, boolean or None, or dicts, lists and tuples of these.
            Ranks may pass different values.
        world: the ranks that take part.
        pickle: whether to send any object with pickle; use it only if you trust all ranks.
        label: the operation, for errors and logs.

    Cost: a gather of the lengths, and a gather of the bytes, padded to the longest.

    Raises:
        PlainDataError: `pickle` is False and the value has another type, or pickle fails.
        CollectiveMismatchError: not all ranks pass the same `pickle`.
    """
    packed.check_stand_ins("af.all_gather_objects", world)
    data = _serialize(value, pickle=pickle)
    kind = f"all_gather_objects{'(pickle=True)' * pickle}"
    world = check_same_call(world, kind, label)
    parts = packed.gather_bytes(data, world, label=label)
    return [_deserialize(part, world, pickle=pickle) for part in parts]


def broadcast_object(
    value: Any,
    world: World,
    *,
    root: int = 0,
    pickle: bool = False,
    label: str = "broadcast_object",
) -> Any:
    """Send the object of rank `root` to all ranks, and return it; other values are ignored.

    Arguments and errors are the same as for `all_gather_objects`; `root` is the rank that sends.

    Cost: a broadcast of the length, and a broadcast of the bytes.
    """
    check_root("broadcast_object", root, world)
    data = _serialize(value, pickle=pickle) if world.rank == root else None
    kind = f"broadcast_object{'(pickle=True)' * pickle}"
    world = check_same_call(world, kind, label, root=root)
    data = packed.broadcast_bytes(data, world, root=root, label=label)
    return _deserialize(data, world, pickle=pickle)


def scatter(
    values: Sequence[Any] | None, world: World, *, root: int = 0, label: str = "scatter"
) -> Any:
    """Send one value from rank `root` to each rank, and return this rank's value.

    Args:
        values: on `root`, a list with one value per rank: a tree of tensors and plain data, with
            any shapes. Ignored on other ranks.
        world: the ranks that take part.
        root: the rank that sends the values.
        label: the operation, for errors and logs.

    Law: gathering the returned values results in the original list.

    Cost: a broadcast of the lengths, and a scatter of the bytes, padded to the longest.

    Raises:
        ArgumentError: the values are not a list or tuple with one value for each rank.
        PlainDataError: a value is neither a tensor nor plain data.
    """
    check_root("scatter", root, world)
    parts = None
    if world.rank == root:
        _check_one_each("scatter", values, world)
        parts = [_PLAIN + codec.to_bytes(value) for value in values or ()]
    world = check_same_call(world, "scatter", label, root=root)
    data = packed.scatter_bytes(parts, world, root=root, label=label)
    return _deserialize(data, world, pickle=False)


def _check_one_each(name: str, values: object, world: World) -> None:
    """Raise unless there is a list or tuple with one value for each rank."""
    is_list = isinstance(values, (list, tuple))
    count = len(cast("Sequence[object]", values)) if is_list else None
    if count != world.size:
        actual = type(values).__name__ if count is None else f"{count} values"
        msg = (
            f"af.{name}: rank {world.rank} passed {actual}; expected a list of {world.size}, one"
            " value for each rank."
        )
        raise ArgumentError(msg)


_PICKLED = b"pickle"
_PLAIN = b"plain "
"""The first bytes of a message; they detect that ranks passed different values of `pickle=`."""


def _serialize(value: Any, *, pickle: bool) -> bytes:
    if not pickle:
        try:
            return _PLAIN + codec.to_bytes(value)
        except PlainDataError as error:
            msg = f"{error} Or pass pickle=True on all ranks, if you trust them."
            raise PlainDataError(msg) from error
    try:
        return _PICKLED + _pickle.dumps(value)
    except Exception as error:  # an object's own pickle method may raise any error
        msg = (
            f"pickle=True: pickle cannot write this {type(value).__name__}, or a value in it:"
            f" {error}. Remove that value. Define functions and classes at the top"
            " level of a module."
        )
        raise PlainDataError(msg) from error


def _deserialize(data: bytes, world: World, *, pickle: bool) -> Any:
    kind, inside = data[: len(_PLAIN)], data[len(_PLAIN) :]
    if kind != (_PICKLED if pickle else _PLAIN):
        msg = (
            f"Rank {world.rank} of {world.size} passed pickle={pickle}, but another rank passed"
            f" pickle={not pickle}. Pass the same value of pickle on all ranks."
        )
        raise CollectiveMismatchError(msg)
    if pickle:
        return _pickle.loads(inside)  # noqa: S301 - the user passed pickle=True
    return codec.from_bytes(inside, str(world.device))


# `all_to_all`: each rank sends a value to each rank.


Shapes: TypeAlias = list[list[int]]


def all_to_all(
    values: Sequence[T], world: World, *, equal: bool = False, label: str = "all_to_all"
) -> list[T]:
    """Send one value to each rank; return the values that the ranks sent to this rank.

    Args:
        values: a tree of tensors for each rank, in rank order. All trees on all ranks must have
            the same structure, dtypes and numbers of dims; sizes may differ.
        world: the ranks that take part.
        equal: whether all shapes are equal on all ranks. Then ranks do not exchange shapes.
        label: the operation, for errors and logs.

    Returns: the received trees, in the order of the sending ranks.

    Law: a second call with the result returns the original values.

    Cost: one all-to-all of the bytes, and before it one of the sizes, unless `equal` is True.

    Raises:
        ArgumentError: there is not one value for each rank, structures differ, a leaf is not a
            tensor, or `equal` is True and shapes differ.
    """
    packed.check_stand_ins("af.all_to_all", world)
    _check_one_each("all_to_all", values, world)
    lists = [tensors_of(value, label, world) for value in values]
    _warn_of_lost_gradients([*chain.from_iterable(lists)], label, world)
    outlines = [tree.outline(value, _kind) for value in values]
    for rank, outline in enumerate(outlines):
        if outline != outlines[0]:
            msg = (
                f"af.all_to_all: the value for rank 0 is {outlines[0]}, but the value for rank"
                f" {rank} is {outline}. Structures, dtypes and numbers of dims must be equal."
            )
            raise ArgumentError(msg)
    free = None if equal else ...
    world = check_same_call(world, "all_to_all", label, values[0], free=free)
    if world.size == 1 or not lists[0]:
        return [tree.clone(value) for value in values]
    shapes = _check_equal(lists) if equal else _exchange_shapes(lists, world, label)
    trees = _exchange_tensors(lists, shapes, world, label)
    return [tree.with_leaves(values[0], tensors) for tensors in trees]


def _check_equal(lists: list[list[torch.Tensor]]) -> list[Shapes]:
    """Check that all trees have equal shapes; return these shapes once per rank."""
    shapes = [[list(leaf.shape) for leaf in leaves] for leaves in lists]
    for rank, shape in enumerate(shapes):
        if shape != shapes[0]:
            msg = (
                f"af.all_to_all(equal=True): the value for rank 0 has the shapes {shapes[0]},"
                f" but the value for rank {rank} has {shape}. Remove equal=True."
            )
            raise ArgumentError(msg)
    return shapes


def _exchange_shapes(
    lists: list[list[torch.Tensor]], world: World, label: str
) -> list[Shapes]:
    """Return the shapes of the tensors that each rank sends to this rank."""
    sizes = [[size for leaf in leaves for size in leaf.shape] for leaves in lists]
    outgoing = torch.tensor(sizes, dtype=torch.int64, device=readable(world.device))
    incoming = torch.empty_like(outgoing)
    with naming(label, world):
        dist.all_to_all_single(incoming, outgoing, group=world.group)
    rows = map(iter, incoming.tolist())
    return [[list(islice(row, leaf.ndim)) for leaf in lists[0]] for row in rows]


def _exchange_tensors(
    lists: list[list[torch.Tensor]], shapes: list[Shapes], world: World, label: str
) -> Iterator[list[torch.Tensor]]:
    """Yield the tensors that each rank sends to this rank; `shapes` are their shapes."""
    outgoing = [torch.cat([_bytes(leaf) for leaf in leaves]) for leaves in lists]
    counts = [[*map(_num_bytes, lists[0], row)] for row in shapes]
    totals, sizes = [*map(sum, counts)], [*map(len, outgoing)]
    incoming = outgoing[0].new_empty(sum(totals))
    with naming(label, world):
        flat = torch.cat(outgoing)
        dist.all_to_all_single(incoming, flat, totals, sizes, group=world.group)
    del outgoing, flat  # free their memory before the copies below
    for row, count, data in zip(shapes, counts, incoming.split(totals), strict=True):
        parts = zip(lists[0], row, data.split(count), strict=True)
        yield [part.clone().view(leaf.dtype).view(shape) for leaf, shape, part in parts]


def _bytes(leaf: torch.Tensor) -> torch.Tensor:
    plain = leaf.detach().resolve_conj().resolve_neg()
    return packed.pack([plain]).view(torch.uint8)


def _num_bytes(leaf: torch.Tensor, shape: list[int]) -> int:
    return math.prod(shape) * leaf.element_size()


def _kind(leaf: torch.Tensor) -> str:
    return f"{leaf.ndim}-dim {leaf.dtype}"
