# SPDX-License-Identifier: Apache-2.0
"""Tensors across ranks: each call has a label, and its failure a name.

Tensors travel packed in one contiguous buffer: one call for any number of them, and
non-contiguous ones, which Gloo would reduce wrongly and silently, are safe.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch._utils import (
    _flatten_dense_tensors,  # pyright: ignore[reportPrivateUsage]
    _unflatten_dense_tensors,  # pyright: ignore[reportPrivateUsage]
)

from accelfn.base import lists
from accelfn.base.accelerator import sent
from accelfn.base.arguments import Number
from accelfn.base.calling import called
from accelfn.base.valueless import readable
from accelfn.collectives.agreed import agreed, alike, check_world
from accelfn.collectives.naming import naming
from accelfn.errors import CollectiveMismatchError
from accelfn.world import World

_TOGETHER = 16
"""Numbers of the first message in which ranks add up what they have under names: six that tell
the names, and five metrics."""


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
    lists.copy_([tensor.detach() for tensor in tensors], views)


_CONTIGUOUS = torch.contiguous_format
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


def start_sum_(flat: torch.Tensor, world: World, *, label: str) -> Callable[[], None]:
    """Begin to sum one contiguous tensor over all ranks, in place; return what waits for it."""
    world = alike(world, "all_reduce", label, [flat])
    if world.size == 1:
        return lambda: None
    with naming(label, world):
        work: Any = dist.all_reduce(flat, group=world.group, async_op=True)

    def wait() -> None:
        with naming(label, world, begins=False):
            work.wait()

    return wait


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
    packed = tensor.resolve_conj().resolve_neg().contiguous()
    known = packed.dtype in _MOVED
    sent = packed if known else _carried(pack([packed]))
    gathered = [torch.empty_like(sent) for _ in range(world.size)]
    with naming(label, world):
        dist.all_gather(gathered, sent, group=world.group)
    if known:
        return gathered
    return [each.view(tensor.dtype).view(tensor.shape) for each in gathered]


def all_gather_rows(
    tensors: Sequence[torch.Tensor],
    counts: Sequence[Sequence[int]],
    world: World,
    *,
    label: str,
) -> list[torch.Tensor]:
    """Return the rows of every rank, concatenated in rank order, in one call a dtype.

    Args:
        tensors: this rank's; all but dim 0 is the same on all ranks.
        counts: for each tensor, how many rows each rank has.
        world: whose ranks take part.
        label: what the ranks are doing.
    """
    if world.size == 1:
        each = zip(tensors, counts, strict=True)
        return [_filled(t, n)[:n].clone(memory_format=_CONTIGUOUS) for t, (n,) in each]
    found: dict[int, torch.Tensor] = {}
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        places = [i for i, tensor in enumerate(tensors) if tensor.dtype == dtype]
        filled = [_filled(tensors[i], max(counts[i])) for i in places]
        sizes = [tensor.numel() for tensor in filled]
        flats = all_gather(pack(filled), world, label=label)
        of_ranks = zip(*(flat.split(sizes) for flat in flats), strict=True)
        for i, like, parts in zip(places, filled, of_ranks, strict=True):
            whole = zip(parts, counts[i], strict=True)
            found[i] = torch.cat([part.view_as(like)[:count] for part, count in whole])
    return [found[i] for i in range(len(tensors))]


def _filled(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """Return a tensor with so many rows, the last ones zero."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    if len(plain) == rows:
        return plain
    filled = plain.new_zeros((rows, *plain.shape[1:]))
    filled[: len(plain)] = plain
    return filled


def broadcast_bytes(
    data: bytes | None, world: World, *, label: str, root: int = 0
) -> bytes:
    """Return what rank `root` has; others give None."""
    if data is not None and world.size == 1:
        return data
    world = alike(world, "broadcast_bytes", label, root=root)
    size = torch.tensor([len(data or b"")], device=readable(world.device))
    broadcast_([size], world, label=label, root=root)
    buffer = _as_tensor(data or b"", int(size)).to(readable(world.device))
    broadcast_([buffer], world, label=label, root=root)
    return buffer.cpu().numpy().tobytes()


def scatter_bytes(
    parts: Sequence[bytes] | None, world: World, *, label: str, root: int = 0
) -> bytes:
    """Return this rank's part of what rank `root` has for each; others give None."""
    if parts is not None and world.size == 1:
        return parts[0]
    world = alike(world, "scatter_bytes", label, root=root)
    device = readable(world.device)
    sizes = torch.zeros(world.size, dtype=torch.int64, device=device)
    if parts is not None:
        sizes = torch.tensor([len(part) for part in parts], device=device)
    broadcast_([sizes], world, label=label, root=root)
    mine, longest = int(sizes[world.rank]), int(sizes.max())
    buffer = torch.zeros(longest, dtype=torch.uint8, device=device)
    padded = None
    if parts is not None:
        padded = [_as_tensor(part, longest).to(device) for part in parts]
    with naming(label, world):
        dist.scatter(buffer, padded, group=world.group, group_src=root)
    return buffer[:mine].cpu().numpy().tobytes()


def _as_tensor(data: bytes, length: int) -> torch.Tensor:
    """Return bytes as a tensor of a length, filled up with zeros."""
    if not length:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(data.ljust(length, b"\0")), dtype=torch.uint8)


@called
def barrier(world: World, *, label: str = "barrier") -> None:
    """Wait until every rank is here; `label` says for what, in errors."""
    check_world("barrier", world)
    all_reduce_([torch.zeros(1, device=world.device)], world, label=label)


def sum_named(
    numbers: Mapping[str, Sequence[Number]],
    world: World,
    *,
    kind: str,
    label: str,
    what: str,
) -> dict[str, list[float]]:
    """Return the sums over all ranks of some numbers under each name.

    Args:
        numbers: as many under each name; ranks may have the names in any order.
        world: whose ranks add.
        kind: which collective this is, where ranks compare their calls.
        label: what the ranks are doing.
        what: the things that have these names, as an error calls them.

    Raises:
        CollectiveMismatchError: ranks have other names, or more.
    """
    names = sorted(numbers)  # the same order on all ranks
    world = agreed(world, kind, label, dict.fromkeys(names))
    told = (*_told(json.dumps(names)), *(x for name in names for x in numbers[name]))
    # as long on all ranks, whatever they have: Gloo aborts a process that gets too much
    first, rest = told[:_TOGETHER], told[_TOGETHER:]
    first = (*first, *(0 for _ in range(_TOGETHER - len(first))))
    summed = _summed(first, world, label)
    if _differ(summed[:6], world):
        _refuse_names(names, world, label, what)
    if rest:
        summed += _summed(rest, world, label)
    parts = iter(summed[6:])
    sums = {name: [next(parts) for _ in numbers[name]] for name in names}
    return {name: sums[name] for name in numbers}


def _summed(numbers: Sequence[Number], world: World, label: str) -> list[float]:
    flat = _in_a_row(numbers, _adds_on(world))
    sum_(flat, world, label=label)
    return flat.tolist()


def _adds_on(world: World) -> torch.device:
    """Return where numbers are added in float64: on the host if this rank adds alone."""
    has_no_float64 = world.device.type == "mps"
    here = world.size == 1 or has_no_float64
    return torch.device("cpu") if here else readable(world.device)


def _in_a_row(numbers: Sequence[Number], device: torch.device) -> torch.Tensor:
    """Return numbers as one vector on a device, to which the host's are under way together."""
    there = {
        i: number
        for i, number in enumerate(numbers)
        if isinstance(number, torch.Tensor) and not number.is_cpu
    }
    here = [0.0 if i in there else _read(number) for i, number in enumerate(numbers)]
    row = sent(torch.tensor(here, dtype=torch.float64), device)
    if not there:
        return row
    parts = [*row.unbind()]
    for i, number in there.items():
        parts[i] = number.detach().reshape(()).to(device).double()
    return torch.stack(parts)


def _read(number: Number) -> float:
    return float(number.detach() if isinstance(number, torch.Tensor) else number)


def _told(text: str) -> list[int]:
    """Return three numbers that a text is known by, and their squares."""
    digest = hashlib.blake2b(text.encode(), digest_size=6).digest()
    parts = [int.from_bytes(digest[i : i + 2], "little") for i in (0, 2, 4)]
    return [*parts, *(part**2 for part in parts)]


def _differ(sums: Sequence[float], world: World) -> bool:
    """Return whether ranks told different numbers: if so the sum of squares is too large.

    By Cauchy and Schwarz, so all ranks know; the sums are integers below 2**53, thus exact.
    """
    told = [int(each) for each in sums]
    pairs = zip(told[:3], told[3:], strict=True)
    return any(world.size * squares != total**2 for total, squares in pairs)


def are_told_alike(text: str, world: World, *, label: str) -> bool:
    """Return whether all ranks say the same text, of which none is sent: six numbers are added.

    As much on any number of ranks. Two texts are taken for one by chance, one in 2**48.
    """
    flat = _in_a_row(_told(text), _adds_on(world))
    sum_(flat, world, label=label)
    return not _differ(flat.tolist(), world)


def _refuse_names(names: list[str], world: World, label: str, what: str) -> NoReturn:
    told = gather_text(json.dumps(names), world, label=label)
    rows = "\n".join(f"  rank {rank}: {each}" for rank, each in enumerate(told))
    msg = (
        f"Rank {world.rank} of {world.size}: the ranks have {what} of different names,"
        f" which cannot be added:\n{rows}"
    )
    raise CollectiveMismatchError(msg)


def gather_text(text: str, world: World, *, label: str) -> list[str]:
    """Return every rank's text, in rank order."""
    return [each.decode() for each in gather_bytes(text.encode(), world, label=label)]


def gather_bytes(data: bytes, world: World, *, label: str) -> list[bytes]:
    """Return every rank's bytes, in rank order."""
    world = alike(world, "gather_bytes", label)
    device = readable(world.device)
    size = torch.tensor([len(data)], device=device)
    counts = torch.cat(all_gather(size, world, label=label)).tolist()
    longest = max(counts)
    padded = _as_tensor(data, longest).to(device)
    joined = torch.cat(all_gather(padded, world, label=label)).cpu().numpy().tobytes()
    return [joined[i * longest : i * longest + n] for i, n in enumerate(counts)]
