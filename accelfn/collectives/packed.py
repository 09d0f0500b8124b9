# SPDX-License-Identifier: Apache-2.0
"""Labeled collectives on lists of tensors, packed into one buffer per dtype.

One call sends any number of tensors in a contiguous buffer. So tensors need not be
contiguous, although Gloo would silently reduce non-contiguous tensors wrongly.
"""

import hashlib
import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn, cast

import torch
import torch.distributed as dist
from torch._utils import (
    _flatten_dense_tensors,  # pyright: ignore[reportPrivateUsage]
    _unflatten_dense_tensors,  # pyright: ignore[reportPrivateUsage]
)

from accelfn.base import tree
from accelfn.base.arguments import Number, advise, is_number, is_positive_number
from accelfn.base.devices import is_positive, readable, send_async
from accelfn.base.tree import local
from accelfn.collectives.failures import (
    as_tensor,
    await_turn,
    check_same_call,
    check_same_tensors,
    check_world,
    gather_bytes,
    naming,
    start,
)
from accelfn.errors import ArgumentError, CollectiveMismatchError, LossError
from accelfn.world import World

_TOGETHER = 16
"""Length of the first message of `sum_named`: 6 numbers for the names, 10 for five metrics."""


def pack(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Copy tensors of one dtype into one vector."""
    with torch.no_grad():
        if len(tensors) == 1:  # torch would return the tensor itself
            return torch.cat([tensors[0].reshape(-1)])
        return _flatten_dense_tensors(tensors)


def split_vector(
    flat: torch.Tensor, tensors: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """Split a packed vector into tensors with the shapes of `tensors`."""
    return _unflatten_dense_tensors(flat, tensors)


def places_by_dtype(tensors: Sequence[torch.Tensor]) -> dict[torch.dtype, list[int]]:
    """Return the indices of the tensors of each dtype; dtypes in order of first occurrence."""
    places: dict[torch.dtype, list[int]] = {}
    for i, tensor in enumerate(tensors):
        places.setdefault(tensor.dtype, []).append(i)
    return places


def unpack_(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """Copy the elements of a packed vector back into the tensors."""
    sizes = [tensor.numel() for tensor in tensors]
    parts = flat.split(sizes)
    views = [part.view_as(t) for part, t in zip(parts, tensors, strict=True)]
    tree.copy_([tensor.detach() for tensor in tensors], views)


_CONTIGUOUS = torch.contiguous_format
_MOVED = frozenset(
    {
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
        *(torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64),
        *(torch.complex64, torch.complex128),
    }
)
"""Dtypes that Gloo can send; tensors of other dtypes are sent as bytes."""


def _as_sendable(flat: torch.Tensor) -> torch.Tensor:
    """View a tensor in a dtype that every backend can send."""
    return flat if flat.dtype in _MOVED else flat.view(torch.uint8)


def sum_(flat: torch.Tensor, world: World, *, label: str) -> None:
    """Sum one contiguous tensor over all ranks, in place."""
    world = check_same_tensors(world, "all_reduce", label, [flat])
    if world.size > 1:
        with naming(label, world):
            dist.all_reduce(flat, group=world.group)


def start_sum_(flat: torch.Tensor, world: World, *, label: str) -> Callable[[], None]:
    """Start to sum a contiguous tensor over all ranks, in place; return a function that waits."""
    world = check_same_tensors(world, "all_reduce", label, [flat])
    return _start_all_reduce(flat, world, "sum", label)


def all_reduce_(tensors: Sequence[torch.Tensor], world: World, *, label: str) -> None:
    """Sum tensors over all ranks, in place, in one call per dtype."""
    if world.size > 1:
        world = check_same_tensors(world, "all_reduce", label, tensors)
        for same, flat in _by_dtype(tensors):
            sum_(flat, world, label=label)
            unpack_(flat, same)


def broadcast_(
    tensors: Sequence[torch.Tensor], world: World, *, label: str, root: int = 0
) -> None:
    """Broadcast the values of rank `root`, in place, in one call per dtype."""
    if world.size > 1:
        world = check_same_tensors(world, "broadcast", label, tensors, root=root)
        for same, flat in _by_dtype(tensors):
            with naming(label, world):
                dist.broadcast(_as_sendable(flat), group=world.group, group_src=root)
            unpack_(flat, same)


def _by_dtype(
    tensors: Sequence[torch.Tensor],
) -> Iterator[tuple[list[torch.Tensor], torch.Tensor]]:
    """Yield the tensors of each dtype, and these tensors as one vector."""
    for places in places_by_dtype(tensors).values():
        same = [tensors[i] for i in places]
        yield same, pack(same)


def all_gather_list(
    tensor: torch.Tensor, world: World, *, label: str
) -> list[torch.Tensor]:
    """Return every rank's tensor, in rank order; shapes and dtypes must be equal."""
    if world.size == 1:
        return [tensor.clone()]
    world = check_same_tensors(world, "all_gather", label, [tensor])
    plain = tensor.resolve_conj().resolve_neg().contiguous()
    is_sendable = plain.dtype in _MOVED
    outgoing = plain if is_sendable else _as_sendable(pack([plain]))
    rows = [torch.empty_like(outgoing) for _ in range(world.size)]
    with naming(label, world):
        dist.all_gather(rows, outgoing, group=world.group)
    if is_sendable:
        return rows
    return [row.view(tensor.dtype).view(tensor.shape) for row in rows]


def all_gather_rows(
    tensors: Sequence[torch.Tensor],
    counts: Sequence[Sequence[int]],
    world: World,
    *,
    label: str,
) -> list[torch.Tensor]:
    """Return the rows of every rank, concatenated in rank order, in one call per dtype.

    Args:
        tensors: this rank's tensors; all dims except dim 0 are equal on all ranks.
        counts: for each tensor, the number of rows of each rank.
        world: the ranks that take part.
        label: the operation, for errors.
    """
    if world.size == 1:
        pairs = zip(tensors, counts, strict=True)
        return [
            _pad_rows(t, n)[:n].clone(memory_format=_CONTIGUOUS) for t, (n,) in pairs
        ]
    results: dict[int, torch.Tensor] = {}
    for places in places_by_dtype(tensors).values():
        rows = [_pad_rows(tensors[i], max(counts[i])) for i in places]
        sizes = [tensor.numel() for tensor in rows]
        flats = all_gather_list(pack(rows), world, label=label)
        of_ranks = zip(*(flat.split(sizes) for flat in flats), strict=True)
        for i, like, parts in zip(places, rows, of_ranks, strict=True):
            pairs = zip(parts, counts[i], strict=True)
            results[i] = torch.cat(
                [part.view_as(like)[:count] for part, count in pairs]
            )
    return [results[i] for i in range(len(tensors))]


def _pad_rows(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """Append rows of zeros to a tensor, up to `rows` rows."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    if len(plain) == rows:
        return plain
    result = plain.new_zeros((rows, *plain.shape[1:]))
    result[: len(plain)] = plain
    return result


def broadcast_bytes(
    data: bytes | None, world: World, *, label: str, root: int = 0
) -> bytes:
    """Send the bytes of rank `root` to all ranks, and return the bytes. Others pass None."""
    if data is not None and world.size == 1:
        return data
    world = check_same_tensors(world, "broadcast_bytes", label, root=root)
    size = torch.tensor([len(data or b"")], device=readable(world.device))
    broadcast_([size], world, label=label, root=root)
    buffer = as_tensor(data or b"", int(size)).to(readable(world.device))
    broadcast_([buffer], world, label=label, root=root)
    return buffer.cpu().numpy().tobytes()


def scatter_bytes(
    parts: Sequence[bytes] | None, world: World, *, label: str, root: int = 0
) -> bytes:
    """Send each rank its bytes from rank `root`, and return these bytes. Others pass None."""
    if parts is not None and world.size == 1:
        return parts[0]
    world = check_same_tensors(world, "scatter_bytes", label, root=root)
    device = readable(world.device)
    sizes = torch.zeros(world.size, dtype=torch.int64, device=device)
    if parts is not None:
        sizes = torch.tensor([len(part) for part in parts], device=device)
    broadcast_([sizes], world, label=label, root=root)
    length, longest = int(sizes[world.rank]), int(sizes.max())
    buffer = torch.zeros(longest, dtype=torch.uint8, device=device)
    rows = None
    if parts is not None:
        rows = [as_tensor(part, longest).to(device) for part in parts]
    with naming(label, world):
        dist.scatter(buffer, rows, group=world.group, group_src=root)
    return buffer[:length].cpu().numpy().tobytes()


def barrier(world: World, *, label: str = "barrier") -> None:
    """Wait until every rank has called `barrier`; error messages show `label`."""
    check_world("barrier", world)
    all_reduce_([torch.zeros(1, device=world.device)], world, label=label)


def sum_named(
    numbers: Mapping[str, Sequence[Number]],
    world: World,
    *,
    kind: str,
    label: str,
    noun: str,
) -> dict[str, list[float]]:
    """Return, for each name, the sums of its numbers over all ranks.

    Args:
        numbers: a list of numbers for each name, of the same length for all names. Ranks must
            have the same names, in any order.
        world: the ranks whose numbers are added.
        kind: the collective's name when ranks compare their calls.
        label: the operation, for errors.
        noun: a word for the named numbers, for errors, such as "metrics".

    Raises:
        CollectiveMismatchError: ranks have different names.
    """
    names = sorted(numbers)  # the same order on all ranks
    world = check_same_call(world, kind, label, dict.fromkeys(names))
    values: list[Number] = [*_fingerprint(json.dumps(names))]
    values += [number for name in names for number in numbers[name]]
    # all ranks send messages of equal length, because Gloo aborts a process that gets too much
    first, rest = values[:_TOGETHER], values[_TOGETHER:]
    first += [0] * (_TOGETHER - len(first))
    totals = _sum_numbers(first, world, label)
    if _differ(totals[:6], world):
        _refuse_names(names, world, label, noun)
    if rest:
        totals += _sum_numbers(rest, world, label)
    parts = iter(totals[6:])
    sums = {name: [next(parts) for _ in numbers[name]] for name in names}
    return {name: sums[name] for name in numbers}


def _sum_numbers(numbers: Sequence[Number], world: World, label: str) -> list[float]:
    # in float64, which Apple's GPU does not have
    use_host = world.size == 1 or world.device.type == "mps"
    device = torch.device("cpu") if use_host else readable(world.device)
    flat = _in_a_row(numbers, device)
    sum_(flat, world, label=label)
    return flat.tolist()


def _in_a_row(numbers: Sequence[Number], device: torch.device) -> torch.Tensor:
    """Return numbers as a vector on a device, with one copy for all numbers on the CPU."""
    on_device = {
        i: number
        for i, number in enumerate(numbers)
        if isinstance(number, torch.Tensor) and not number.is_cpu
    }
    values = [0.0 if i in on_device else _to_float(n) for i, n in enumerate(numbers)]
    row = send_async(torch.tensor(values, dtype=torch.float64), device)
    if not on_device:
        return row
    parts = [*row.unbind()]
    for i, number in on_device.items():
        parts[i] = number.detach().reshape(()).to(device).double()
    return torch.stack(parts)


def _to_float(number: Number) -> float:
    return float(number.detach() if isinstance(number, torch.Tensor) else number)


def _fingerprint(text: str) -> list[int]:
    """Return three hash numbers of a text, and their squares."""
    digest = hashlib.blake2b(text.encode(), digest_size=6).digest()
    parts = [int.from_bytes(digest[i : i + 2], "little") for i in (0, 2, 4)]
    return [*parts, *(part**2 for part in parts)]


def _differ(sums: Sequence[float], world: World) -> bool:
    """Return whether ranks have different numbers, from the sums of `_fingerprint` over ranks.

    By the Cauchy-Schwarz inequality, (number of ranks) * (sum of squares) is the square of the
    sum only if all ranks have the same number. The sums are integers below 2**53, so they are
    exact, and all ranks get the same result.
    """
    numbers = [int(total) for total in sums]
    pairs = zip(numbers[:3], numbers[3:], strict=True)
    return any(world.size * squares != total**2 for total, squares in pairs)


def is_same_text(text: str, world: World, *, label: str) -> bool:
    """Return whether all ranks have the same text, from one sum of six numbers over the ranks.

    The message size does not depend on the number of ranks. Two different texts count as equal
    with probability 1 in 2**48.
    """
    return not _differ(_sum_numbers(_fingerprint(text), world, label), world)


def _refuse_names(names: list[str], world: World, label: str, noun: str) -> NoReturn:
    rows_by_rank = gather_text(json.dumps(names), world, label=label)
    rows = "\n".join(f"  rank {rank}: {row}" for rank, row in enumerate(rows_by_rank))
    msg = (
        f"Rank {world.rank} of {world.size}: the ranks have {noun} with different names, so"
        f" they cannot be added. Use the same names on all ranks:\n{rows}"
    )
    raise CollectiveMismatchError(msg)


def gather_text(text: str, world: World, *, label: str) -> list[str]:
    """Return every rank's text, in rank order."""
    return [part.decode() for part in gather_bytes(text.encode(), world, label=label)]


# Reductions of tensors of one dtype, with the same results on every backend.
#
# Gloo does not support every dtype, and adds 8-bit integers in 8 bits. Its minimum and maximum
# keep or drop NaN depending on the order of the ranks.


_OPS = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.SUM,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "product": dist.ReduceOp.PRODUCT,
}
_WIDER = {
    torch.bool: torch.int64,
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
}
"""Dtypes that Gloo cannot reduce, and the dtype to use instead; results wrap around as before."""
_REAL = frozenset(
    {
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
        *(torch.uint8, torch.int8, torch.int32, torch.int64),
        *_WIDER,
    }
)
_COMPLEX = frozenset({torch.complex64, torch.complex128})


def check_reducible(dtypes: Collection[torch.dtype], op: object) -> None:
    """Raise unless ranks can reduce these dtypes with `op`.

    Raises:
        ArgumentError: a dtype cannot be reduced with `op`, or `op` is unknown.
    """
    if not isinstance(op, str) or op not in _OPS:
        msg = f"af.all_reduce(op={op!r}): expected one of {', '.join(map(repr, _OPS))}."
        raise ArgumentError(msg)
    for dtype in dtypes:
        if dtype in _COMPLEX and op not in ("sum", "mean"):
            msg = f'af.all_reduce(op={op!r}): {dtype} supports only op="sum" and op="mean".'
            raise ArgumentError(msg)
        if dtype not in _REAL | _COMPLEX:
            msg = f"af.all_reduce: {dtype} cannot be reduced. Convert to another dtype first."
            raise ArgumentError(msg)


def check_weight(op: str, weight: object, bucket_cap_mb: object) -> None:
    """Raise if `weight` or `bucket_cap_mb` of a reduction is invalid; both may be None.

    Raises:
        ArgumentError: the reduction is not a mean, the weight is not a number of at least 0,
            or the buffer size is not positive.
    """
    if weight is None and bucket_cap_mb is None:
        return
    if op != "mean" or weight is None:
        option = "weight" if weight is not None else "bucket_cap_mb"
        msg = (
            f"af.all_reduce({op!r}, {option}=...): {option} is only for weighted means. Write"
            ' af.all_reduce(values, world, "mean", weight=...).'
        )
        raise ArgumentError(msg)
    if isinstance(weight, torch.Tensor):
        good = weight.numel() == 1 and weight.dtype in _REAL
    else:
        good = is_number(weight) and 0 <= weight < math.inf
    if not good:
        msg = f"af.all_reduce(weight={weight!r}): expected one number, 0 or more."
        raise ArgumentError(msg)
    if bucket_cap_mb is not None and not is_positive_number(bucket_cap_mb):
        msg = f"af.all_reduce(bucket_cap_mb={bucket_cap_mb!r}): expected a positive number of MiB."
        raise ArgumentError(msg)


def as_floats(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in a dtype that can represent its mean: integers become float64."""
    return tensor.detach() if _is_float(tensor.dtype) else tensor.to(torch.float64)


def in_default_floats(tensor: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
    """Return the mean of a tensor; for an integer tensor, convert it to the default dtype."""
    return mean if _is_float(tensor.dtype) else mean.to(torch.get_default_dtype())


def _is_float(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def reduce_same(
    same: Sequence[torch.Tensor], world: World, op: str, label: str
) -> Sequence[torch.Tensor]:
    """Reduce tensors of one dtype over all ranks; the results are views of one vector."""
    return start_reduce_same(same, world, op, label)()


def start_reduce_same(
    same: Sequence[torch.Tensor], world: World, op: str, label: str
) -> Callable[[], Sequence[torch.Tensor]]:
    """Start to reduce tensors of one dtype; return a function that waits for the results."""
    dtype = same[0].dtype
    as_integers = op in ("min", "max") and dtype.is_floating_point
    flat = pack(same)
    if as_integers:
        flat = _integers(flat, op)
    elif op == "mean":
        flat = flat.to(_dtype_of_sum(dtype))
    elif dtype in _WIDER:
        flat = flat.to(_WIDER[dtype])
    wait = _start_all_reduce(flat, world, op, label)
    result_dtype = dtype
    if op == "mean" and not _is_float(dtype):
        result_dtype = torch.get_default_dtype()
    elif op == "sum" and dtype is torch.bool:
        result_dtype = flat.dtype
    metas = [torch.empty_like(tensor, device="meta") for tensor in same]

    def finish() -> Sequence[torch.Tensor]:
        wait()
        result = _floats(flat, dtype) if as_integers else flat
        result = result / world.size if op == "mean" else result
        return split_vector(result.to(result_dtype), metas)

    return finish


def _start_all_reduce(
    flat: torch.Tensor, world: World, op: str, label: str
) -> Callable[[], None]:
    """Start to reduce a vector in place; return a function that waits for the result."""
    if world.size == 1:
        return lambda: None
    numbers = torch.view_as_real(flat) if flat.dtype.is_complex else flat
    among: Any = {"group": world.group, "async_op": True}
    return start(partial(dist.all_reduce, numbers, _OPS[op], **among), label, world)


def _dtype_of_sum(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the sum that a mean is computed from."""
    if dtype in (torch.float16, torch.bfloat16):
        return torch.float32
    return dtype if _is_float(dtype) else torch.float64


_ORDERED = {
    torch.float64: (torch.float64, torch.int64),
    torch.float32: (torch.float32, torch.int32),
    torch.float16: (torch.float32, torch.int32),
    torch.bfloat16: (torch.float32, torch.int32),
}


def _integers(floats: torch.Tensor, op: str) -> torch.Tensor:
    """Map floats to integers of the same order, such that NaN is the minimum or maximum."""
    wide, integer = _ORDERED[floats.dtype]
    limits = torch.iinfo(integer)
    bits = floats.to(wide).view(integer)
    integers = bits ^ ((bits >> (limits.bits - 1)) & limits.max)
    nan = limits.max if op == "max" else limits.min
    return integers.masked_fill_(floats.isnan(), nan)


def _floats(integers: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Map the integers of `_integers` back to floats."""
    wide, integer = _ORDERED[dtype]
    limits = torch.iinfo(integer)
    bits = integers ^ ((integers >> (limits.bits - 1)) & limits.max)
    return bits.view(wide).to(dtype)


# Weighted means over ranks, in place, in buffers of limited size.


_MIB = 1 << 20


def average_(
    tensors: Sequence[torch.Tensor],
    weight: Number,
    world: World,
    *,
    label: str,
    bucket_cap_mb: float | None = None,
) -> None:
    """Replace floating-point tensors by their weighted mean over the ranks, in place.

    The weight is sent at the end of each buffer. If the weight is 0 on all ranks, the result
    is the unweighted mean. Integer tensors are unchanged. For a DTensor, the local shard is
    averaged.

    Args:
        tensors: tensors with equal shapes and dtypes on all ranks.
        weight: this rank's weight, 0 or more.
        world: the ranks to average over.
        label: the operation, for errors.
        bucket_cap_mb: the size of a buffer in MiB; None uses one buffer per dtype.
    """
    moving = [part for part in map(local, tensors) if _is_float(part.dtype)]
    if world.size == 1:
        return
    for kind in dict.fromkeys((tensor.dtype, tensor.device) for tensor in moving):
        same = [tensor for tensor in moving if (tensor.dtype, tensor.device) == kind]
        for bucket in _buckets(same, bucket_cap_mb):
            _average_bucket_(bucket, weight, world, label)


def _average_bucket_(
    same: Sequence[torch.Tensor], weight: Number, world: World, label: str
) -> None:
    dtype = same[0].dtype
    # 16-bit dtypes cannot represent large weights, so average in float32
    wide = dtype if dtype.itemsize >= 4 else torch.float32
    factor = torch.zeros(1, dtype=wide, device=world.device) + weight
    factor = factor.to(same[0].device)  # offloaded shards are on the CPU
    flat = pack([*same, factor.to(dtype)]).to(wide)
    flat[-1:] = 1
    flat.mul_(factor)
    sum_(flat, world, label=label)
    # the check waits for the device; a positive Python number needs no check
    may_be_zero = isinstance(weight, torch.Tensor) or weight == 0
    if may_be_zero and not is_positive(flat[-1].real):
        _average_bucket_(same, 1, world, label)
        return
    flat.div_(flat[-1].clone())
    unpack_(flat[:-1], same)


def _buckets(
    tensors: Sequence[torch.Tensor], bucket_cap_mb: float | None
) -> Iterator[Sequence[torch.Tensor]]:
    """Yield lists of tensors of one dtype that fit in a buffer, in order.

    A contiguous tensor that is larger than the buffer is split into pieces.
    """
    if bucket_cap_mb is None:
        yield tensors
        return
    most = max(1, int(bucket_cap_mb * _MIB) // tensors[0].element_size())
    bucket: list[torch.Tensor] = []
    room = most
    for tensor in tensors:
        stays_whole = tensor.numel() <= most or not tensor.is_contiguous()
        for piece in [tensor] if stays_whole else tensor.view(-1).split(most):
            if bucket and piece.numel() > room:
                yield bucket
                bucket, room = [], most
            bucket.append(piece)
            room -= piece.numel()
    if bucket:
        yield bucket


# A differentiable all-gather. Its backward pass is a collective that is also differentiable.


def gather_with_grad(
    rows: torch.Tensor, counts: Sequence[int], worlds: tuple[World, World], label: str
) -> torch.Tensor:
    """Gather the rows of all ranks; in the backward pass, sum the rows' gradients over ranks.

    Args:
        rows: this rank's rows.
        counts: the number of rows of each rank.
        worlds: the world of the gather, and the world of the backward pass.
        label: the operation, for errors.
    """
    return cast("Any", _Gather).apply(rows, counts, worlds, label)


class _Gather(torch.autograd.Function):
    """An all-gather. The backward pass sums the gradients of a rank's rows over the ranks."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, *options: Any) -> torch.Tensor:
        ctx.counts, (ready, ctx.world), ctx.label = options
        return all_gather_rows([rows], [ctx.counts], ready, label=ctx.label)[0]

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        (gradient,) = grad_outputs
        label = f"{ctx.label}: gradient"
        grad = cast("Any", _SumOfMine).apply(gradient, ctx.counts, ctx.world, label)
        return grad, None, None, None


class _SumOfMine(torch.autograd.Function):
    """A reduce-scatter: the sum over ranks of the gradients of this rank's rows."""

    @staticmethod
    def forward(ctx: Any, everyone: torch.Tensor, *options: Any) -> torch.Tensor:
        counts, world, label = ctx.counts, ctx.world, ctx.label = options
        ready = check_same_call(world, "gather(grad=True).backward", label, everyone)
        (total,) = reduce_same([everyone], ready, "sum", label)
        return total.split(list(counts))[world.rank].clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        (gradient,) = grad_outputs
        ready = check_same_call(
            ctx.world, "gather(grad=True).backward", ctx.label, gradient, free=0
        )
        counts, rows = ctx.counts, gradient.resolve_conj().resolve_neg()
        everyone = gather_with_grad(rows, counts, (ready, ctx.world), ctx.label)
        return everyone, None, None, None


# Collectives in a loss: ranks may have different numbers of samples, or only a filler.


def uneven_counts(world: World, label: str) -> list[int] | None:
    """Return each rank's number of samples in a loss; None if equal, or outside a loss.

    If no rank of this world has a sample, as can happen in a part of a world, the result is
    None, and filler samples count as samples.

    Cost: one all-gather of an integer, only if ranks have different numbers of samples. Ranks
    know without a collective whether the numbers differ.
    """
    counts = _counts(world, label)
    if not counts or (None not in counts and len({*counts}) == 1):
        return None
    await_turn(f"samples of {label}", world)
    count = world.connection.activity.samples.known
    row = torch.tensor([1 if count is None else count], device=readable(world.device))
    all_counts = torch.cat(all_gather_list(row, world, label=label)).tolist()
    return all_counts if any(all_counts) else None


def check_stand_ins(call: str, world: World) -> None:
    """Raise if a rank has only a filler sample and the loss has no argument `sample_weight`.

    Raises:
        LossError: the values of filler samples would count; all ranks raise this error.
    """
    counts = _counts(world, call)
    without = [rank for rank, count in enumerate(counts) if count == 0]
    asks = not without or world.connection.activity.samples.is_weighed
    if not asks and len(without) < len(counts):
        msg = (
            f"{call}: rank {', '.join(map(str, without))} has no sample in this pass. Its filler"
            " sample would count in the result. Write def loss_fn(model, batch, *, sample_weight),"
            " and multiply the values by sample_weight, which is 0 for filler samples."
        )
        raise LossError(msg)


def warn_of_parts(world: World, label: str) -> None:
    """Warn if a loss calls a collective that covers only one of several micro-batches."""
    samples = world.connection.activity.samples
    if samples is not None and not samples.is_whole:
        advise(
            f"The loss calls the collective {label!r} in an update with several micro-batches."
            " The collective covers only one micro-batch, so the loss depends on the number of"
            " micro-batches. Compute the statistic of the whole batch before the step, or use"
            " af.checkpoint_activations() instead of af.accumulate to save memory."
        )


def _counts(world: World, label: str) -> Sequence[int | None]:
    """Return the number of samples of each rank's share in a loss; () outside a loss."""
    check_world(label, world)
    activity = world.connection.activity
    if activity.samples is None or world.size == 1:
        return ()
    activity.has_coupled = True
    return activity.samples.counts()


# All-gather and reduce-scatter for Gloo, implemented with all-to-all.
#
# Gloo's all-gather passes tensors around a ring, one round per other rank, and its
# reduce-scatter computes all sums on all ranks. On two processes, a gather of 800 kB took 0.3 ms
# of CPU time with all-to-all and 0.8 ms with Gloo's all-gather. A reduce-scatter took 0.3 ms
# and 1.2 ms. For 25 MB both gathers took equal time, and the reduce-scatters 6 ms and 15 ms.
#
# Point-to-point messages take about 0.6 times as long as an all-to-all, for large tensors and
# if all ranks start at the same time. If they do not, as between the units of a model,
# messages take longer than an all-to-all.


_TAG_OF_GLOO = 0x6167
"""The tag of accelfn's messages; a user's own messages should have other tags."""


def carries(group: Any, device: torch.device) -> bool:
    """Return whether a group sends tensors on this device with Gloo, which needs the CPU."""
    if device.type != "cpu":
        return False
    return group._get_backend(device).name() == "gloo"


def gather_(vector: torch.Tensor, part: torch.Tensor, group: Any) -> None:
    """All-gather the parts of all ranks into `vector`; `part` may be a view of `vector`."""
    rows = part.repeat(group.size())
    dist.all_to_all_single(vector, rows, group=group)


def reduce_scatter_(part: torch.Tensor, vector: torch.Tensor, group: Any) -> None:
    """Sum `vector` over the ranks, in rank order, and store this rank's slice in `part`."""
    rows = torch.empty_like(vector).view(group.size(), *part.shape)
    dist.all_to_all_single(rows.view_as(vector), vector, group=group)
    torch.sum(rows, 0, dtype=part.dtype, out=part)


def reduce_to_holders_(
    tensors: Sequence[torch.Tensor], holders: Sequence[int], group: Any
) -> None:
    """Sum each tensor over all ranks, in place, on one rank; other ranks keep their tensor.

    Each rank posts all receives before it sends.

    Args:
        tensors: contiguous tensors with the same shapes on all ranks.
        holders: for each tensor, the rank in the group that gets the sum.
        group: the process group.
    """
    size, rank = group.size(), group.rank()
    pairs = list(zip(tensors, holders, strict=True))
    own_tensors = [tensor for tensor, holder in pairs if holder == rank]
    peers = [peer for peer in range(size) if peer != rank]
    got = {peer: [torch.empty_like(tensor) for tensor in own_tensors] for peer in peers}
    among: dict[str, Any] = {"group": group, "tag": _TAG_OF_GLOO}
    receives: list[Any] = [
        dist.irecv(tensor, group_src=peer, **among)
        for peer in peers
        for tensor in got[peer]
    ]
    sends: list[Any] = [
        dist.isend(tensor, group_dst=holder, **among)
        for tensor, holder in pairs
        if holder != rank
    ]
    for work in receives:
        work.wait()
    got[rank] = own_tensors
    for i, tensor in enumerate(own_tensors):
        total = got[0][i]
        for peer in range(1, size):
            total.add_(got[peer][i])
        if rank:
            tensor.copy_(total)
    for work in sends:
        work.wait()
