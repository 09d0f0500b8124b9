# SPDX-License-Identifier: Apache-2.0
"""`regroup`: a state goes on in the world of all ranks that are there."""

from typing import Any

from accelfn.base import tree
from accelfn.base.arguments import why_not
from accelfn.base.calling import called
from accelfn.checkpoint.moving import Restore, moved
from accelfn.collectives import broadcast_object, gather_text
from accelfn.errors import ArgumentError, PeerFailedError, WorldError
from accelfn.state.argument import check_state
from accelfn.state.state import TrainState
from accelfn.world import World

_CALL = "af.regroup(state)"


@called
def regroup(state: TrainState, *, restore: Restore | None = None) -> TrainState:
    """Return the state as it goes on in the world of all ranks that are there.

    For runs whose ranks come and go, under `accelfn launch --elastic` or simulated with
    `elastic=`. All ranks of a world call it, at three moments:

    - As the training begins: a rank that was started in the place of one that is gone waits
      here until the others let it in, and takes their state over. The others go on at once.
    - Where ranks have just averaged: what is in flight arrives, and who waits comes in. If
      nobody does the state comes back as it is.
    - After a `PeerFailedError`, with the state that it gave the last time, of which a copy was
      trained since: those that are left go on from there. What any rank did since counts for
      nothing, and its samples are read again: each epoch is covered once.

    Ranks are numbered anew, in their old order; batches, learning rate and order of samples
    stay as they are. The old world is closed: `state.world` has the new one.

    Args:
        state: not donated. Where ranks give states of different updates, as when one had its
            average before another failed in it, all take over the newest.
        restore: where the model is split, those that are left have not all parts of it: then
            all go on with what this gives for a state that says what it is a state of, as
            `store.restore` of an `af.CheckpointStore`. It is called on all ranks, newcomers
            too, and what was done since that checkpoint is done again.

    Law: those that are left go on, bitwise, as from a checkpoint that they had saved of what
    they give, loaded on as many ranks as go on; a newcomer loads it, too. With `restore`, as
    from the checkpoint that it loads.

    Cost: a broadcast of some bytes where nobody waits. Else ranks meet anew, and then that of
    `af.with_world`. A state that is kept is memory for one more.

    Raises:
        PeerFailedError: what is in flight does not arrive, a rank that is alive did not come
            within the world's timeout, or fewer are left than may go on.
        StateError: those that are left have not all parts of a model that is split, and
            there is no `restore`, or it has none to give.
        WorldError: the run is not elastic, or the state's world has axes, or is a part of one.

    Example:
        >>> import accelfn as af
        >>> from accelfn.testing import simulate
        >>> def train(world):
        ...     state = af.TrainState.create(
        ...         model=lambda: torch.nn.Linear(1, 1), optimizer=torch.optim.SGD, world=world
        ...     )
        ...     return af.regroup(state) is state
        >>> simulate(2, train, elastic=1).results
        (True, True)
    """
    check_state(_CALL, state)
    state.lease.check()
    _check(restore, state)
    tree.tree_leaves(state.slots)  # what is in flight arrives, or fails here
    world = state.world
    newcomer = _regrouping_of(world).is_newcomer
    while True:
        met = _met(world)
        if met is world:
            return state
        try:
            said = "" if newcomer else str(state.step)
            steps = gather_text(said, met, label="regroup: who has the newest state")
            newest = max((int(each) for each in steps if each), default=0)
            behind = newcomer or state.step < newest
            return moved(state, met, met, newcomer=behind, restore=restore)
        except PeerFailedError:  # another is gone; the rest of these meet again
            if not met.connection.is_broken:
                raise  # of another world, as `restore` may know one
            world = met


def _check(restore: object, state: TrainState) -> None:
    if restore is None:
        return
    why = why_not(restore, state) if callable(restore) else "it is none"
    if why is not None:
        shown = restore if callable(restore) else type(restore).__name__
        msg = (
            f"af.regroup(state, restore={shown}): expected a function of a state that gives"
            f" the one to go on with, as store.restore of an af.CheckpointStore: {why}."
        )
        raise ArgumentError(msg)


def _regrouping_of(world: World) -> Any:
    """Return how the ranks of a world meet anew.

    Raises:
        WorldError: they cannot.
    """
    if world.whole is not world:
        msg = (
            f"{_CALL}: the state is in a part of a world, of {world.size} ranks. Regroup a"
            " state of the whole: af.with_world(state, world.whole)."
        )
        raise WorldError(msg)
    if world.axes:
        msg = (
            f"{_CALL}: the world has axes, {dict(world.axes)}, and without a rank they are not"
            " whole. Leave them out, or go on from the last checkpoint."
        )
        raise WorldError(msg)
    regrouping = world.connection.regrouping
    if regrouping is None:
        msg = (
            f"{_CALL}: the ranks of this world cannot meet anew. Start them with `accelfn"
            " launch --elastic MIN:MAX`, or simulate(size, fn, elastic=MIN)."
        )
        raise WorldError(msg)
    return regrouping


def _met(world: World) -> World:
    """Return the next world; this one where all of it are there, and nobody waits."""
    regrouping = _regrouping_of(world)
    if not regrouping.is_newcomer and not world.connection.is_broken:
        try:
            awaited = broadcast_object(
                regrouping.is_awaited(), world, label="regroup: ask who waits"
            )
        except PeerFailedError:
            awaited = True
        if not awaited:
            return world
    return regrouping.meet(world)
