# SPDX-License-Identifier: Apache-2.0
"""Explain failed collectives, find the rank that failed, and compare the calls of ranks."""

import contextlib
import functools
import hashlib
import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import EllipsisType
from typing import TYPE_CHECKING, Any, NoReturn

import attrs
import torch
import torch.distributed as dist
import typing_extensions

from accelfn.base import tree
from accelfn.base.devices import readable
from accelfn.errors import (
    ArgumentError,
    CollectiveMismatchError,
    Error,
    PeerFailedError,
)
from accelfn.world import World
from accelfn.world.connection import Standing

if TYPE_CHECKING:
    from types import FrameType

_PEER_SIGNS = (
    "Application timeout caused pair closure",
    "Connection closed by peer",
    "Connection reset by peer",
    "Timed out waiting",
    "Broken pipe",
    "remote process",
    "NCCL",
)
_WHERE_IN_SOURCE = re.compile(r"^\[[^\]]*\.(cc|cpp)[^\]]*\]\s*")


class naming:
    """Turn a backend's failure inside a `with` block into `PeerFailedError`.

    Raises:
        PeerFailedError: another rank closed the connection or did not arrive in time.
    """

    __slots__ = ("_begins", "_label", "_outer", "_world")

    def __init__(self, label: str, world: World, *, begins: bool = True) -> None:
        """Store the operation's label and world.

        Pass `begins=False` for the wait of an operation that has already started.
        """
        self._label, self._begins = label, begins
        self._world = world
        self._outer: str | None = None

    def __enter__(self) -> None:
        """Record the label of this rank's operation."""
        connection = self._world.connection
        if connection.is_lent:
            connection.check_not_lent()
        activity = connection.activity
        self._outer, activity.label = activity.label, self._label
        if self._begins:
            activity.trail.append((self._label, activity.step))

    def __exit__(
        self, kind: object, error: BaseException | None, trace: object
    ) -> None:
        """Raise `PeerFailedError` if the block failed because of another rank."""
        activity = self._world.connection.activity
        activity.label, activity.structure = self._outer, None
        if isinstance(error, PeerFailedError):
            self._world.whole.connection.is_broken = True
        if not isinstance(error, RuntimeError) or isinstance(error, Error):
            return
        if any(sign in str(error) for sign in _PEER_SIGNS):
            all_ranks = self._world.whole
            all_ranks.connection.is_broken = True

            msg = (
                f"Rank {all_ranks.rank} of {all_ranks.size} waited in {self._label!r}"
                f"{self._when()}, but {missing(self._world, self._label)}"
                f" ({_in_short(str(error))})"
            )
            # `from None` hides the backend's traceback, which explains nothing
            raise PeerFailedError(msg) from None

    def _when(self) -> str:
        step = self._world.connection.activity.step
        return "" if step is None else f" at update {step}"


def start(begin: Callable[[], Any], label: str, world: World) -> Callable[[], None]:
    """Start an asynchronous collective, and return a function that waits for its end."""
    with naming(label, world):
        work = begin()

    def wait() -> None:
        with naming(label, world, begins=False):
            work.wait()

    return wait


def _in_short(words: str) -> str:
    """Return the first sentence of a backend's error message, without the source location."""
    first = _WHERE_IN_SOURCE.sub("", words.splitlines()[0])
    return first.partition(". ")[0]


# Finding the ranks that failed or did not arrive.


_AT_ONCE = timedelta(milliseconds=1)
_GONE = "failed, left or did not arrive"
_LOOK = "Look at its output for the cause."


def missing(world: World, label: str) -> str:
    """Return a text that names the rank that failed, left or did not arrive."""
    all_ranks = world.whole
    roll = all_ranks.connection.roll_call
    if roll is None:
        return _somebody(all_ranks)
    all_ranks.connection.tell(f"waited in {label!r}", is_waiting=True)
    wake(all_ranks)
    heard = roll.hear()
    if heard is None and roll.rank_0_keeps_it:
        return f"rank 0 or another rank {_GONE}: the store of rank 0 does not answer."
    return _somebody(all_ranks) if heard is None else _absence(all_ranks, label, heard)


def break_off(world: World, error: BaseException) -> None:
    """Report this rank's error to the other ranks, and make ranks that wait for it fail now."""
    all_ranks = world.whole
    all_ranks.connection.fail(error)
    wake(all_ranks)


def _somebody(world: World) -> str:
    other = f"rank {1 - world.rank}" if world.size == 2 else "another rank"
    return f"{other} {_GONE}. {_LOOK}"


def _absence(world: World, label: str, heard: Mapping[int, Standing]) -> str:
    absent = {rank: status for rank, status in heard.items() if not status.is_waiting}
    silent = [r for r in range(world.size) if r != world.rank and r not in heard]
    place = Standing(how=f"waited in {label!r}", step=world.connection.activity.step)
    astray = {
        rank: status
        for rank, status in heard.items()
        if rank not in absent and str(status) != str(place)
    }
    if absent:
        summary = f"{_list_standings(absent)}."
    elif silent:
        summary = f"{named(silent)} {_GONE}. {_LOOK}"
    elif astray:
        advice = "Make this call on every rank: is it inside `if world.is_main:`?"
        return f"{_list_standings(astray)}: the ranks make different calls. {advice}"
    else:
        summary = (
            "no rank failed: a rank arrived after the timeout, or a connection broke."
        )
    return f"{summary} Other ranks: {_list_standings(astray)}." if astray else summary


def wake(world: World) -> None:
    """Make ranks that wait for this rank fail now, not at their timeout.

    Gloo closes all of a rank's connections when a call on one of them times out.
    """
    connection = world.connection
    groups = [part.group for part in (connection, *connection.parts.values())]
    for group in filter(None, groups):
        for peer in range(group.size()):
            if peer != group.rank():
                with suppress(RuntimeError):  # the receive is meant to time out
                    group.recv([torch.empty(1)], peer, 0).wait(_AT_ONCE)


def named(ranks: Sequence[int]) -> str:
    """Format ranks for a sentence, such as "ranks 1, 2 and 3"."""
    *most, last = map(str, ranks)
    return f"ranks {', '.join(most)} and {last}" if most else f"rank {last}"


def _list_standings(standings: dict[int, Standing]) -> str:
    return ", ".join(f"rank {rank} {standing}" for rank, standing in standings.items())


# Texts for errors about a call: its tensors, its line in the user's code, a table of ranks.


def format_tensor(tensor: torch.Tensor) -> str:
    """Format a tensor's shape and dtype, and its layout if not strided."""
    layout = "" if tensor.layout is torch.strided else f" {tensor.layout}"
    return f"{tuple(tensor.shape)} {tensor.dtype}{layout}".replace("torch.", "")


def table(rows: Mapping[int, tuple[str, ...]]) -> str:
    """Format a table with one line per rank and aligned columns."""
    width = max(len(row) for row in rows.values())
    full_rows = {rank: (*row, *[""] * (width - len(row))) for rank, row in rows.items()}
    widths = [max(len(row[i]) for row in full_rows.values()) for i in range(width)]
    lines: list[str] = []
    for rank, row in full_rows.items():
        cells = [cell.ljust(w) for cell, w in zip(row, widths, strict=True) if w]
        lines.append(f"  rank {rank}: {'  '.join(cells)}".rstrip())
    return "\n".join(lines)


_NOT_USERS = (
    str(Path(__file__).parents[1]) + os.sep,
    str(Path(torch.__file__).parent) + os.sep,
    typing_extensions.__file__,  # its `deprecated` wraps functions of torch
    contextlib.__file__,
    functools.__file__,
    "<attrs",
    "<frozen",
)


def site() -> str:
    """Return file and line of the innermost frame outside torch and accelfn."""
    frame: FrameType | None = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame is not None:
        path = frame.f_code.co_filename
        if _is_users(path):
            return f"{path.rpartition(os.sep)[2]}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


@functools.cache
def _is_users(path: str) -> bool:
    return not path.startswith(_NOT_USERS)


# Checked worlds: ranks compare their calls before each collective.
#
# If ranks call different collectives, a backend waits until its timeout, aborts the process
# or returns wrong numbers. Comparing 8 bytes per rank detects the mistake before the call.


def check_same_call(
    world: World,
    kind: str,
    label: str,
    values: Any = None,
    **options: Any,
) -> World:
    """Check that all ranks make the same call, and return the world for the call.

    The arguments are those of `check_same_tensors`. A simulated world always compares calls.

    Raises:
        ArgumentError: `world` is not a World.
        CollectiveMismatchError: ranks make different calls; all ranks raise it.
    """
    check_world(label, world)
    connection = world.connection
    await_turn(label if label == kind else f"{kind} {label}", world)
    # a world of one rank makes no call, and only a call would reset the structure
    if connection.simulated is not None and world.size > 1:
        star = partial(_star, grad=options.get("grad", False))
        connection.activity.structure = tree.outline(values, star)
    return check_same_tensors(world, kind, label, values, **options)


def await_turn(label: str, world: World) -> None:
    """Call the loss's hook `before_call`: it may wait until other collectives have run."""
    before_call = world.connection.activity.before_call
    if before_call is not None and world.size > 1:
        before_call(label, world)


def check_world(call: str, world: object) -> None:
    """Raise unless an argument is a World.

    Raises:
        ArgumentError: the argument has another type.
    """
    if not isinstance(world, World):
        msg = f"{call}: expected an af.World, got {world!r}. Write af.World.from_env()."
        raise ArgumentError(msg)


def _star(leaf: Any, *, grad: bool) -> str:
    return "* that requires grad" if grad and _requires_grad(leaf) else "*"


def _requires_grad(leaf: torch.Tensor) -> bool:
    return leaf.requires_grad and torch.is_grad_enabled()


def check_same_tensors(
    world: World,
    kind: str,
    label: str,
    values: Any = None,
    *,
    free: int | EllipsisType | None = None,
    op: str | None = None,
    root: int | None = None,
    grad: bool = False,
) -> World:
    """In a checked world, check that all ranks make the same call with equal shapes and dtypes.

    Args:
        world: the ranks; they compare their calls only if it is `checked`.
        kind: the name of the collective.
        label: the operation, for errors.
        values: a tree; tensors need equal shapes and dtypes, and other leaves may differ.
        free: the dim whose size may differ between ranks; `...` means every dim.
        op: the reduction.
        root: the rank that sends.
        grad: whether `requires_grad` must also be equal.

    Returns: the world for the call, which does not compare again.

    Cost: none in an unchecked world; otherwise one all-gather of 8 bytes.

    Raises:
        CollectiveMismatchError: ranks make different calls; all ranks raise it.
    """
    if not world.checked or world.size == 1:
        return world
    leaves = tree.leaves_by_key(values)
    call = {
        "kind": kind,
        "reduction": op,
        "root": root,
        "structure": tree.outline(values, lambda _: "*"),
        "shape or dtype": [_form_of(leaf, free) for leaf in leaves],
        "need of gradients": [grad and _requires_grad(leaf) for leaf in leaves],
        "label": label,
    }
    plain_world = attrs.evolve(world, group=world.connection, checked=False)
    digest = hashlib.blake2b(json.dumps(call).encode(), digest_size=8).digest()
    own_digest = as_tensor(digest, 8).view(torch.int64).to(readable(world.device))
    digests = {int(n) for n in _gather_tensor(own_digest, plain_world, label)}
    if len(digests) > 1:
        outline = tree.outline(values, partial(_form_of, free=free, grad=grad))
        _refuse(call, outline, plain_world)
    return plain_world


def _form_of(leaf: Any, free: int | EllipsisType | None, *, grad: bool = False) -> str:
    if not isinstance(leaf, torch.Tensor):
        return "*"
    sizes = [str(size) for size in leaf.shape]
    if isinstance(free, EllipsisType):
        sizes = ["any" for _ in sizes]
    elif free is not None:
        sizes = sizes or [""]  # a scalar counts as one row
        sizes[free] = "any"
    dtype = str(leaf.dtype).removeprefix("torch.")
    wants = " that requires grad" if grad and _requires_grad(leaf) else ""
    return f"{dtype}[{', '.join(sizes)}]{wants}"


def _refuse(call: dict[str, Any], outline: str, world: World) -> NoReturn:
    """Gather the calls of all ranks, and raise an error with a table of them."""
    label = call["label"]
    text = json.dumps([call, outline, world.connection.activity.step, site()]).encode()
    calls = [json.loads(data) for data in gather_bytes(text, world, label=label)]
    differing = [
        name for name in call if any(row[0][name] != calls[0][0][name] for row in calls)
    ]
    rows = {rank: _row(*row) for rank, row in enumerate(calls)}
    msg = (
        f"Rank {world.rank} of {world.size}: the ranks' calls do not match in"
        f" {', '.join(differing)}. All ranks must make the same calls in the same order. No data"
        f" was exchanged. The call of each rank:\n{table(rows)}"
    )
    raise CollectiveMismatchError(msg)


def _row(
    call: dict[str, Any], outline: str, step: int | None, place: str
) -> tuple[str, ...]:
    root = "" if call["root"] is None else f"root {call['root']}"
    how = (call["reduction"] or "", root, outline)
    when = "" if step is None else f"update {step}"
    return (call["kind"], " ".join(filter(None, how)), repr(call["label"]), when, place)


def gather_bytes(data: bytes, world: World, *, label: str) -> list[bytes]:
    """Return every rank's bytes, in rank order."""
    world = check_same_tensors(world, "gather_bytes", label)
    if world.size == 1:
        return [data]
    device = readable(world.device)
    size = torch.tensor([len(data)], device=device)
    counts = [int(count) for count in _gather_tensor(size, world, label)]
    rows = _gather_tensor(as_tensor(data, max(counts)).to(device), world, label)
    pairs = zip(rows, counts, strict=True)
    return [row.cpu().numpy().tobytes()[:count] for row, count in pairs]


def as_tensor(data: bytes, length: int) -> torch.Tensor:
    """Return bytes as a uint8 tensor, padded with zeros to a length."""
    if not length:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(data.ljust(length, b"\0")), dtype=torch.uint8)


def _gather_tensor(
    tensor: torch.Tensor, world: World, label: str
) -> list[torch.Tensor]:
    tensors = [torch.empty_like(tensor) for _ in range(world.size)]
    with naming(label, world):
        dist.all_gather(tensors, tensor, group=world.group)
    return tensors
