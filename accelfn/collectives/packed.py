# SPDX-License-Identifier: Apache-2.0
"""Tensors across ranks: each call has a label, and its failure a name.

Tensors travel packed in one contiguous buffer: one call for any number of them, and
non-contiguous ones, which Gloo would reduce wrongly and silently, are safe.
"""

from collections.abc import Collection, Mapping, Sequence

import torch
import torch.distributed as dist
from torch._utils import (
    _flatten_dense_tensors,  # pyright: ignore[reportPrivateUsage]
    _unflatten_dense_tensors,  # pyright: ignore[reportPrivateUsage]
)

from accelfn import foreach
from accelfn.collectives.agreed import agreed, alike
from accelfn.collectives.naming import naming
from accelfn.errors import ArgumentError, ReplicaMismatchError
from accelfn.loss import Metrics
from accelfn.world import World


def pack(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the elements of tensors of one dtype as one vector, with memory of its own."""
    with torch.no_grad():
        if len(tensors) == 1:  # torch would return the tensor itself
            return torch.cat([tensors[0].reshape(-1)])
        return _flatten_dense_tensors(tensors)


def cut(
    flat: torch.Tensor, tensors: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """Return parts of a vector, shaped like the tensors that it was packed from."""
    return _unflatten_dense_tensors(flat, tensors)


def unpack_(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """Write a vector's elements back into the tensors that it was packed from."""
    sizes = [tensor.numel() for tensor in tensors]
    parts = flat.split(sizes)
    views = [part.view_as(t) for part, t in zip(parts, tensors, strict=True)]
    foreach.copy_([tensor.detach() for tensor in tensors], views)


_MOVED = frozenset(
    {
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
        *(torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64),
        *(torch.complex64, torch.complex128),
    }
)
"""What Gloo carries; anything else travels as bytes."""


def _carried(flat: torch.Tensor) -> torch.Tensor:
    """Return the same memory as a dtype that every backend carries."""
    return flat if flat.dtype in _MOVED else flat.view(torch.uint8)


def sum_(flat: torch.Tensor, world: World, *, label: str) -> None:
    """Sum one contiguous tensor over all ranks, in place."""
    world = alike(world, "all_reduce", label, [flat])
    if world.size > 1:
        with naming(label, world):
            dist.all_reduce(flat, group=world.group)


def all_reduce_(tensors: Sequence[torch.Tensor], world: World, *, label: str) -> None:
    """Sum tensors over all ranks, in place, in one call a dtype."""
    if world.size == 1:
        return
    world = alike(world, "all_reduce", label, tensors)
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        same = [tensor for tensor in tensors if tensor.dtype == dtype]
        flat = pack(same)
        sum_(flat, world, label=label)
        unpack_(flat, same)


def broadcast_(
    tensors: Sequence[torch.Tensor], world: World, *, label: str, root: int = 0
) -> None:
    """Give every rank the values of rank `root`, in place, in one call a dtype."""
    if world.size == 1:
        return
    world = alike(world, "broadcast", label, tensors, root=root)
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        same = [tensor for tensor in tensors if tensor.dtype == dtype]
        flat = pack(same)
        with naming(label, world):
            dist.broadcast(_carried(flat), group=world.group, group_src=root)
        unpack_(flat, same)


def all_gather(tensor: torch.Tensor, world: World, *, label: str) -> list[torch.Tensor]:
    """Return every rank's tensor, in rank order; shape and dtype are equal on all."""
    if world.size == 1:
        return [tensor.clone()]
    world = alike(world, "all_gather", label, [tensor])
    packed = tensor.contiguous()
    known = packed.dtype in _MOVED
    sent = packed if known else _carried(packed.reshape(-1))
    gathered = [torch.empty_like(sent) for _ in range(world.size)]
    with naming(label, world):
        dist.all_gather(gathered, sent, group=world.group)
    if known:
        return gathered
    return [each.view(tensor.dtype).view(tensor.shape) for each in gathered]


def all_gather_rows(
    tensor: torch.Tensor, counts: Sequence[int], world: World, *, label: str
) -> torch.Tensor:
    """Return the first `counts[r]` rows of every rank r, concatenated in rank order."""
    if world.size == 1:
        return tensor[: counts[0]]
    longest = max(counts)
    padded = tensor.new_zeros((longest, *tensor.shape[1:]))
    mine = counts[world.rank]
    padded[:mine] = tensor[:mine]
    parts = all_gather(padded, world, label=label)
    return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])


def broadcast_bytes(
    data: bytes | None, world: World, *, label: str, root: int = 0
) -> bytes:
    """Return what rank `root` has; others give None."""
    if data is not None and world.size == 1:
        return data
    world = alike(world, "broadcast_bytes", label, root=root)
    size = torch.tensor([len(data or b"")], device=world.device)
    broadcast_([size], world, label=label, root=root)
    buffer = _as_tensor(data or b"", int(size)).to(world.device)
    broadcast_([buffer], world, label=label, root=root)
    return buffer.cpu().numpy().tobytes()


def scatter_bytes(
    parts: Sequence[bytes] | None, world: World, *, label: str, root: int = 0
) -> bytes:
    """Return this rank's part of what rank `root` has for each; others give None."""
    if parts is not None and world.size == 1:
        return parts[0]
    world = alike(world, "scatter_bytes", label, root=root)
    sizes = torch.zeros(world.size, dtype=torch.int64, device=world.device)
    if parts is not None:
        sizes = torch.tensor([len(part) for part in parts], device=world.device)
    broadcast_([sizes], world, label=label, root=root)
    mine, longest = int(sizes[world.rank]), int(sizes.max())
    buffer = torch.zeros(longest, dtype=torch.uint8, device=world.device)
    padded = None
    if parts is not None:
        padded = [_as_tensor(part, longest).to(world.device) for part in parts]
    with naming(label, world):
        dist.scatter(buffer, padded, group=world.group, group_src=root)
    return buffer[:mine].cpu().numpy().tobytes()


def _as_tensor(data: bytes, length: int) -> torch.Tensor:
    """Return bytes as a tensor of a length, filled up with zeros."""
    if not length:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(data.ljust(length, b"\0")), dtype=torch.uint8)


def barrier(world: World) -> None:
    """Wait until every rank is here."""
    all_reduce_([torch.zeros(1, device=world.device)], world, label="barrier")


def print_once(world: World, *values: object) -> None:
    """Print on rank 0 only."""
    if world.is_main:
        print(*values, flush=True)  # noqa: T201 - printing is what it is for


def mean(metrics: Metrics, world: World) -> dict[str, float]:
    """Return the exact mean of each metric over all ranks: the visible collective.

    Totals and weights are added over ranks and divided once, so the result is the mean
    over all that was seen, however uneven the shares. It reads the device, as a log line
    must; a step does not.

    Cost: one all-reduce of two float64 numbers a name.

    Law: on any number of ranks it is the metric of the union of what they saw.

    Raises:
        PeerFailedError: another rank failed.
    """
    if not isinstance(metrics, Metrics):
        msg = f"af.mean: expected Metrics, got {type(metrics).__name__}; add several first."
        raise ArgumentError(msg)
    names = sorted(metrics)  # the same order on all ranks
    if not names:
        return {}
    label = "mean of metrics"
    world = agreed(world, "mean", label, dict.fromkeys(names))
    # float64 where the device has it; MPS, which has not, is no device of a world
    pairs = [(metrics.sums[name].total, metrics.sums[name].weight) for name in names]
    flat = torch.stack(
        [
            torch.as_tensor(x, dtype=torch.float64, device=world.device)
            .detach()
            .reshape(())
            for pair in pairs
            for x in pair
        ]
    )
    sum_(flat, world, label=label)
    sums: list[float] = flat.tolist()
    means = {
        name: sums[2 * i] / sums[2 * i + 1] if sums[2 * i + 1] else 0.0
        for i, name in enumerate(names)
    }
    return {name: means[name] for name in metrics}


def check_replicas(
    tensors: Mapping[str, torch.Tensor],
    world: World,
    *,
    label: str,
    values: bool,
    trained: Collection[str] | None = None,
) -> None:
    """Raise unless all ranks hold tensors of the same names, shapes, dtypes and values.

    Where `trained` names some of them, they must be the same on all ranks too.

    Cost: a sum over every tensor, and two small all-gathers.

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
    tables = gather_text("\n".join(shown), world, label=label)
    _refuse_difference([table.split("\n") for table in tables], "structure", _CREATED)
    if values:
        check_values(tensors, world, label=label, advice=_CREATED)


def check_values(
    tensors: Mapping[str, torch.Tensor], world: World, *, label: str, advice: str
) -> None:
    """Raise unless all ranks hold the same values; names, shapes and dtypes are known to be.

    Raises:
        ReplicaMismatchError: they do not; the first tensor that differs is named.
    """
    if world.size == 1:
        return
    sums = torch.stack([checksum(tensor) for tensor in tensors.values()])
    rows = [row.tolist() for row in all_gather(sums, world, label=label)]
    named = [
        [f"{n}: checksum {c}" for n, c in zip(tensors, row, strict=True)]
        for row in rows
    ]
    _refuse_difference(named, "values", advice)


def gather_text(text: str, world: World, *, label: str) -> list[str]:
    """Return every rank's text, in rank order."""
    return [each.decode() for each in gather_bytes(text.encode(), world, label=label)]


def gather_bytes(data: bytes, world: World, *, label: str) -> list[bytes]:
    """Return every rank's bytes, in rank order."""
    world = alike(world, "gather_bytes", label)
    raw = _as_tensor(data, len(data)).to(world.device)
    size = torch.tensor([raw.numel()], device=world.device)
    counts = [int(count) for count in all_gather(size, world, label=label)]
    joined = all_gather_rows(raw, counts, world, label=label).cpu().numpy().tobytes()
    ends = [sum(counts[: i + 1]) for i in range(len(counts))]
    return [joined[end - n : end] for end, n in zip(ends, counts, strict=True)]


_CREATED = (
    "Give TrainState.create a factory, which is drawn from the seed on every rank alike, or"
    " load the same weights on every rank."
)


def _refuse_difference(tables: list[list[str]], what: str, advice: str) -> None:
    longest = max(len(table) for table in tables)
    for i in range(longest):
        rows = [table[i] if i < len(table) else "nothing" for table in tables]
        if len(set(rows)) > 1:
            listed = "\n".join(f"  rank {rank}: {row}" for rank, row in enumerate(rows))
            msg = (
                f"The ranks hold models that differ in {what}; tensor {i} is the first"
                f" that differs:\n{listed}\n{advice}"
            )
            raise ReplicaMismatchError(msg)


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of the tensor's bit patterns, without a copy of it."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    plain = torch.view_as_real(plain) if plain.is_complex() else plain
    bits = plain.contiguous().view(_INTEGERS[plain.element_size()])
    return bits.sum(dtype=torch.int64)
