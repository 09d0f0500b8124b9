# SPDX-License-Identifier: Apache-2.0
"""Checked worlds: ranks compare what they are about to do before they do it.

A backend that is given different things on different ranks waits until its timeout, aborts the
process or returns numbers that nobody meant. Eight bytes a rank tell beforehand.
"""

import hashlib
import json
from collections.abc import Sequence
from functools import partial
from types import EllipsisType
from typing import Any, NoReturn

import attrs
import torch
import torch.distributed as dist

from accelfn.base import tree
from accelfn.base.valueless import readable
from accelfn.collectives.calls import site, table
from accelfn.collectives.naming import naming
from accelfn.errors import ArgumentError, CollectiveMismatchError
from accelfn.world import World


def agreed(
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
    """Return the world to make a call in, once all ranks are known to make the same one.

    Args:
        world: nothing is compared unless it is `checked`, or simulated.
        kind: which collective.
        label: what the ranks are doing.
        values: a tree of tensors that must be alike on all ranks; other leaves may differ.
        free: the dimension of tensors in which they may differ all the same; ... for all.
        op: the reduction.
        root: the one rank that sends.
        grad: whether tensors must be alike in that they require gradients, too.

    Cost: none in a world that is not checked, else one all-gather of 8 bytes.

    Raises:
        ArgumentError: it is no world.
        CollectiveMismatchError: ranks are about to make different calls; all of them raise it.
    """
    check_world(label, world)
    connection = world.connection
    await_turn(label if label == kind else f"{kind} {label}", world)
    # alone a rank makes no call, which would take this for its own
    if connection.simulated is not None and world.size > 1:
        connection.activity.structure = tree.outline(values, partial(_star, grad=grad))
    return _compared(world, (kind, op, root, label), values, free, grad=grad)


def await_turn(label: str, world: World) -> None:
    """Let come first what ranks do, in another order, before a collective of a loss."""
    before_call = world.connection.activity.before_call
    if before_call is not None and world.size > 1:
        before_call(label, world)


def alike(
    world: World,
    kind: str,
    label: str,
    tensors: Sequence[torch.Tensor] = (),
    *,
    root: int | None = None,
) -> World:
    """Do the same for a call on tensors that are in no tree of the user's."""
    return _compared(world, (kind, None, root, label), list(tensors), None)


def check_world(call: str, world: object) -> None:
    """Raise unless it is a world.

    Raises:
        ArgumentError: it is none.
    """
    if not isinstance(world, World):
        msg = f"{call}: expected an af.World, got {world!r}. Make one with af.World.from_env()."
        raise ArgumentError(msg)


def _star(leaf: Any, *, grad: bool) -> str:
    return "* that requires grad" if grad and _requires_grad(leaf) else "*"


def _requires_grad(leaf: torch.Tensor) -> bool:
    return leaf.requires_grad and torch.is_grad_enabled()


def _compared(
    world: World,
    call: tuple[str, str | None, int | None, str],
    values: Any,
    free: int | EllipsisType | None,
    *,
    grad: bool = False,
) -> World:
    if not world.checked or world.size == 1:
        return world
    kind, op, root, label = call
    leaves = tree.leaves_by_key(values)
    said = {
        "kind": kind,
        "reduction": op,
        "root": root,
        "structure": tree.outline(values, lambda _: "*"),
        "shape or dtype": [_told(leaf, free) for leaf in leaves],
        "need of gradients": [grad and _requires_grad(leaf) for leaf in leaves],
        "label": label,
    }
    unchecked = attrs.evolve(world, group=world.connection, checked=False)
    digest = hashlib.blake2b(json.dumps(said).encode(), digest_size=8).digest()
    mine = torch.frombuffer(bytearray(digest), dtype=torch.int64).to(
        readable(world.device)
    )
    found = {int(each) for each in _gathered(mine, unchecked, label)}
    if len(found) > 1:
        given = tree.outline(values, partial(_told, free=free, grad=grad))
        _refuse(said, given, unchecked)
    return unchecked


def _told(leaf: Any, free: int | EllipsisType | None, *, grad: bool = False) -> str:
    if not isinstance(leaf, torch.Tensor):
        return "*"
    sizes = [str(size) for size in leaf.shape]
    if isinstance(free, EllipsisType):
        sizes = ["any" for _ in sizes]
    elif free is not None and sizes:
        sizes[free] = "any"
    elif free is not None:  # a scalar is a row
        sizes = ["any"]
    dtype = str(leaf.dtype).removeprefix("torch.")
    wants = " that requires grad" if grad and _requires_grad(leaf) else ""
    return f"{dtype}[{', '.join(sizes)}]{wants}"


def _refuse(said: dict[str, Any], given: str, world: World) -> NoReturn:
    """Tell the ranks of one another, and raise."""
    label = said["label"]
    text = json.dumps([said, given, world.connection.activity.step, site()]).encode()
    size = torch.tensor([len(text)], device=readable(world.device))
    longest = max(int(each) for each in _gathered(size, world, label))
    padded = torch.frombuffer(bytearray(text.ljust(longest)), dtype=torch.uint8)
    texts = _gathered(padded.to(readable(world.device)), world, label)
    told = [json.loads(each.cpu().numpy().tobytes()) for each in texts]
    differing = [
        name for name in said if any(each[0][name] != told[0][0][name] for each in told)
    ]
    rows = {rank: _row(*each) for rank, each in enumerate(told)}
    msg = (
        f"Rank {world.rank} of {world.size}: the ranks are about to make calls of different"
        f" {', '.join(differing)}; none of them has.\n{table(rows)}"
    )
    raise CollectiveMismatchError(msg)


def _row(
    said: dict[str, Any], given: str, step: int | None, place: str
) -> tuple[str, ...]:
    root = "" if said["root"] is None else f"root {said['root']}"
    how = (said["reduction"] or "", root, given)
    when = "" if step is None else f"update {step}"
    return (said["kind"], " ".join(filter(None, how)), repr(said["label"]), when, place)


def _gathered(tensor: torch.Tensor, world: World, label: str) -> list[torch.Tensor]:
    gathered = [torch.empty_like(tensor) for _ in range(world.size)]
    with naming(label, world):
        dist.all_gather(gathered, tensor, group=world.group)
    return gathered
