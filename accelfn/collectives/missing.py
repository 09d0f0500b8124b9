# SPDX-License-Identifier: Apache-2.0
"""`missing`: whom ranks waited for in vain, as far as they can tell each other."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta

import torch

from accelfn.world import World
from accelfn.world.roll_call import Standing

_AT_ONCE = timedelta(milliseconds=1)
_GONE = "failed, left or did not arrive"
_LOOK = "Look at its output for the cause."


def missing(world: World, label: str) -> str:
    """Say in words which rank failed, left or did not arrive while this one waited."""
    whole = world.whole
    roll = whole.connection.roll_call
    if roll is None:
        return _somebody(whole)
    whole.connection.tell(f"waited in {label!r}", is_waiting=True)
    wake(whole)
    heard = roll.hear()
    if heard is None and roll.rank_0_keeps_it:
        return f"rank 0, or one before it, {_GONE}: the store that it keeps is silent."
    return _somebody(whole) if heard is None else _told(whole, label, heard)


def break_off(world: World, error: BaseException) -> None:
    """Let ranks that wait for this one fail now, and hear of it: it will not come."""
    whole = world.whole
    whole.connection.fail(error)
    wake(whole)


def _somebody(world: World) -> str:
    other = f"rank {1 - world.rank}" if world.size == 2 else "another rank"
    return f"{other} {_GONE}. {_LOOK}"


def _told(world: World, label: str, heard: Mapping[int, Standing]) -> str:
    gone = {rank: each for rank, each in heard.items() if not each.is_waiting}
    silent = [r for r in range(world.size) if r != world.rank and r not in heard]
    mine = Standing(how=f"waited in {label!r}", step=world.connection.activity.step)
    astray = {
        rank: each
        for rank, each in heard.items()
        if rank not in gone and str(each) != str(mine)
    }
    if gone:
        said = f"{_listed(gone)}."
    elif silent:
        said = f"{named(silent)} {_GONE}. {_LOOK}"
    else:
        said = "no rank failed: one came later than the timeout, or their connection broke."
    return f"{said} Elsewhere, {_listed(astray)}." if astray else said


def wake(world: World) -> None:
    """Let ranks that wait for this one fail too, and not at their timeout: it is broken.

    Gloo closes all of a rank's connections when a call on one of them times out.
    """
    connection = world.connection
    for group in (
        connection.group,
        *(each.group for each in connection.parts.values()),
    ):
        if group is None:
            continue
        for peer in range(group.size()):
            if peer != group.rank():
                with suppress(RuntimeError):  # which is what it is for
                    group.recv([torch.empty(1)], peer, 0).wait(_AT_ONCE)


def named(ranks: Sequence[int]) -> str:
    """Return what a sentence calls some ranks."""
    *most, last = map(str, ranks)
    return f"ranks {', '.join(most)} and {last}" if most else f"rank {last}"


def _listed(standings: dict[int, Standing]) -> str:
    return ", ".join(f"rank {rank} {each}" for rank, each in standings.items())
