# SPDX-License-Identifier: Apache-2.0
"""`with_world`: a state moved to another world, as by a checkpoint, and without a disk.

What each rank would write it sends, and what it would read it has been sent. So all that
decides who writes what, and what another number of ranks makes of it, is that of checkpoints.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import attrs
import torch

from accelfn.base import tree
from accelfn.base.arguments import call_mismatch, explain_call_errors
from accelfn.checkpoint import commit, files
from accelfn.checkpoint.elastic import (
    Arrivals,
    receive,
    sendings,
    to_merge,
)
from accelfn.checkpoint.load import restore_from
from accelfn.checkpoint.manifest import Manifest
from accelfn.checkpoint.save import contents_of
from accelfn.checkpoint.slices import is_sharded
from accelfn.collectives import broadcast_object, gather_text
from accelfn.definition.definition import check_axes
from accelfn.definition.transform import chain
from accelfn.errors import (
    ArgumentError,
    CheckpointCorruptError,
    PeerFailedError,
    StateError,
    WorldError,
)
from accelfn.state.grads import Lease
from accelfn.state.state import TrainState, check_state
from accelfn.world import World

T = TypeVar("T")
Restore: TypeAlias = Callable[[TrainState], TrainState]

_CALL = "af.with_world(state, world)"


@explain_call_errors
def with_world(
    state: TrainState,
    world: World,
    *,
    among: World | None = None,
    newcomer: bool = False,
) -> TrainState:
    """Return the state as it goes on in another world; call it on all ranks of that world.

    The ranks that have a state hand it over, and newcomers take it. What was a rank's own,
    as between two averages of `local_sgd`, each rank gets back where as many ranks go on as
    handed over; else all get the mean, as `load` gives it. What is in flight arrives first.

    Args:
        state: not donated; it stays as it is. A newcomer's is a fresh one, of the same model,
            optimizer, setup and data: it says what the state is a state of, and no number of
            it is taken.
        world: in which the state is to go on; it may have more ranks than the state's, fewer
            or as many, and other axes.
        among: whose ranks call it, where these are more than those of `world`: so those that
            will not go on in it hand over what is theirs. `world` is a part of it.
        newcomer: whether this rank has nothing to hand over.

    Law: bitwise what `load` gives on the ranks of `world` of what those that hand over have
    saved. There and back, to a world of as many ranks, is nothing.

    Cost: BLAKE3 of what a rank has, as a save; then what that save would write is sent to
    all ranks: what all have alike once, and what is each rank's own for each. A rank keeps in
    the host's memory what it goes on with, until it has it; where there is a mean, that is
    summed as it arrives. So its peak is what it had, what it gets, once more as much, and some
    times the 25 MB that arrive at once, or a tensor if that is larger. Of a split model there
    is room for its parameters too, and the parts as they were where they are cut otherwise.
    On more or fewer ranks slots that a transform merges (PowerSGD's, DiLoCo's) are kept of
    every rank, for its `merge` is given them all.

    Raises:
        StateError: nobody hands over a state, those that do have not all parts of a model
            that is split, or a rank could not say or take it; on all ranks.
        CheckpointError: ranks differed in what has no mean, or a newcomer's state is of
            something else.
        WorldError: ranks along an axis of the world would all do the same.
        ArgumentError: `world` is none, or no part of `among`.
    """
    check_state(_CALL, state)
    state.lease.check()
    meeting = _check_worlds(world, world if among is None else among)
    check_axes(state.setup, world)
    return move(state, world, meeting, newcomer=newcomer)


def move(
    state: TrainState,
    world: World,
    meeting: World,
    *,
    newcomer: bool,
    restore: Restore | None = None,
) -> TrainState:
    """Return the state as it goes on in another world, as `with_world`.

    Args:
        state: not donated.
        world: in which it goes on.
        meeting: of all ranks that call it.
        newcomer: whether this rank has nothing to hand over.
        restore: gives the state that all go on with where the ranks have not all parts of a
            model that is split, of one that says what it is a state of.
    """

    def say() -> commit.Contents | None:
        return None if newcomer else contents_of(state, "write")

    contents, said = _run_on_all("say what it holds", meeting, say, _describe)
    handed = _hand_over(contents, list(map(json.loads, said)), meeting, state)
    if isinstance(handed, StateError):
        if restore is None:
            raise handed
        return _restore_lost(_all_begin(state, world, meeting), restore, handed)
    manifest, arrivals = handed
    where = f"the state of update {manifest.step}"
    fresh = _all_begin(state, world, meeting)

    def take() -> TrainState:
        with arrivals.to_the_end():
            return restore_from(
                fresh, where, lambda: receive(fresh, manifest, where, arrivals)
            )

    taken, _ = _run_on_all(
        "take the state over",
        meeting,
        take,
        lambda _: "",
        can_tell=lambda: not arrivals.is_broken,
    )
    return taken


def _all_begin(state: TrainState, world: World, meeting: World) -> TrainState:
    """Return a state to be loaded into, on all ranks, or raise on all.

    By itself, for the parts of a split model are read in calls that a rank which could not
    begin would not make.
    """
    fresh, _ = _run_on_all(
        "begin anew", meeting, lambda: _fresh_state(state, world), lambda _: ""
    )
    return fresh


def _restore_lost(fresh: TrainState, restore: Restore, lost: StateError) -> TrainState:
    """Return what the caller goes on with where parts of a model are lost.

    Raises:
        StateError: there is nothing, and what was lost is lost.
    """
    found = restore(fresh)
    if not isinstance(found, TrainState):
        msg = (
            f"restore={restore!r} gave {type(found).__name__}; expected the state that it"
            " loaded, as store.restore and partial(af.load, directory=...) give it."
        )
        raise ArgumentError(msg)
    if found is fresh or found.world is not fresh.world:
        what = "in another world" if found is not fresh else "that it was given"
        msg = f"{lost} restore={restore!r} gave the state {what}: there is none to go on with."
        raise StateError(msg) from lost
    return found


def _check_worlds(world: World, among: World) -> World:
    """Return the world whose ranks meet, once both are worlds, one a part of the other."""
    for each in (world, among):
        if not isinstance(each, World):
            msg = (
                f"{_CALL}: expected an af.World, got {each!r}. Take a part of yours, as"
                " world.split(size=...), or make one with af.World.from_env()."
            )
            raise ArgumentError(msg)
    if among is not world and among.whole is not world.whole:
        msg = (
            f"{_CALL}: the world of {world.size} ranks is no part of the world of"
            f" {among.size} ranks that was given as among=."
        )
        raise ArgumentError(msg)
    return among


def _run_on_all(
    what: str,
    world: World,
    act: Callable[[], T],
    told: Callable[[T], str],
    *,
    can_tell: Callable[[], bool] = lambda: True,
) -> tuple[T, list[str]]:
    """Act on every rank; return what this one made, and what all say of theirs, or raise.

    Where the act may leave a collective half done, `can_tell` says whether it has not.

    Raises:
        StateError: another rank could not.
        Exception: what was raised on this rank.
    """
    outcome: T | Exception
    try:
        outcome = act()
        text = f"ok {told(outcome)}"
    except Exception as error:
        if not can_tell():
            raise
        outcome, text = error, f"failed {commit.format_error(error)}"
    texts = gather_text(text, world, label=f"with_world: {what}")
    if isinstance(outcome, Exception):
        raise outcome
    for rank, each in enumerate(texts):
        if not each.startswith("ok "):
            why = each.partition(" ")[2]
            msg = f"{_CALL}: rank {rank} of {world.size} could not {what}: {why}"
            raise StateError(msg)
    return outcome, [each.partition(" ")[2] for each in texts]


def _describe(contents: commit.Contents | None) -> str:
    return json.dumps(contents and commit.describe_contents(contents))


def _hand_over(
    contents: commit.Contents | None,
    said: Sequence[Mapping[str, Any] | None],
    world: World,
    state: TrainState,
) -> tuple[Manifest, Arrivals] | StateError:
    """Return what a save of the ranks that have a state would have written, as it arrives.

    Or the error, on all ranks, that they have not all of a model that is split.

    Raises:
        StateError: no rank has a state.
    """
    givers = [rank for rank, each in enumerate(said) if each is not None]
    if not givers:
        msg = (
            f"{_CALL}: all {world.size} ranks are newcomers, so there is no state to take"
            " over. Load one: af.load(state, directory)."
        )
        raise StateError(msg)
    mine: Mapping[str, torch.Tensor] = {}
    division = None
    if contents is not None:
        ranks = _renumber_copies([each for each in said if each is not None])
        division = commit.divide_writes(contents, ranks, givers.index(world.rank))
        mine = division.mine
    text = json.dumps(files.describe_file(mine).to_plain())
    listed = gather_text(text, world, label="with_world: list tensors")
    written = [files.File.from_plain(json.loads(listed[rank])) for rank in givers]
    told = None
    if world.rank == givers[0] and division is not None and contents is not None:
        there = division.manifest(contents, written, step=state.step)
        merged = {n for r in there.firsts for n in to_merge(state, there, r)}
        told = [there.to_bytes().decode(), sorted(merged)]
    plain, merged = broadcast_object(
        told, world, root=givers[0], label="with_world: say what there is"
    )
    try:
        manifest = Manifest.from_bytes(plain.encode())
    except CheckpointCorruptError as error:
        lost = StateError(
            f"{_CALL}: the {len(givers)} ranks that have a state have not all of it:"
            f" {error}. Go on from the last checkpoint."
        )
        lost.__cause__ = error
        return lost
    return manifest, Arrivals(sendings(manifest, set(merged), givers), mine, world)


def _renumber_copies(ranks: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return what ranks said with copies numbered anew: some may be gone."""
    copies = sorted({each["copy"] for each in ranks if each["copy"] is not None})
    return [
        {**each, "copy": None if each["copy"] is None else copies.index(each["copy"])}
        for each in ranks
    ]


def _fresh_state(state: TrainState, world: World) -> TrainState:
    """Return a state of the same definition in a world, to be loaded into.

    Where the setup says how the model lies, everything lies as it does in that world.
    """
    definition = attrs.evolve(state.definition, world=world)
    owners = state.setup.owners["layout"]
    if world.device != state.world.device:
        state = attrs.evolve(state, slots=_slots_on_device(state.slots, world.device))
    if not owners:
        return attrs.evolve(state, definition=definition)
    layout = definition.layout
    params: dict[str, torch.Tensor] = {}
    for name, param in state.params.items():
        zeros = torch.zeros(param.shape, dtype=param.dtype)
        laid = zeros if layout is None else layout.cut(name, zeros)
        params[name] = laid if is_sharded(laid) else laid.to(world.device)
    transforms = {each.name for each in state.setup}
    own = {
        name: slot
        for name, slot in state.slots.items()
        if name not in transforms and not any(map(is_sharded, tree.tree_leaves(slot)))
    }
    fresh = attrs.evolve(
        state,
        params=params,
        buffers={n: b.to(world.device) for n, b in state.buffers.items()},
        opt_state={},
        slots=own,
        definition=attrs.evolve(definition, setup=chain(*owners)),
        lease=Lease(),
    )
    return fresh.with_setup(state.setup)


def _slots_on_device(slots: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Return slots on a device, but for what is in parts."""

    def put(leaf: Any) -> Any:
        is_whole = isinstance(leaf, torch.Tensor) and not is_sharded(leaf)
        return leaf.to(device) if is_whole else leaf

    return {name: tree.tree_map(put, slot) for name, slot in slots.items()}


# `regroup`: a state goes on in the world of all ranks that are there.


_REGROUP = "af.regroup(state)"


@explain_call_errors
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
    check_state(_REGROUP, state)
    state.lease.check()
    _check(restore, state)
    tree.tree_leaves(state.slots)  # what is in flight arrives, or fails here
    world = state.world
    newcomer = _regrouping_of(world).is_newcomer
    while True:
        met = _next_world(world)
        if met is world:
            return state
        try:
            said = "" if newcomer else str(state.step)
            steps = gather_text(said, met, label="regroup: who has the newest state")
            newest = max((int(each) for each in steps if each), default=0)
            behind = newcomer or state.step < newest
            return move(state, met, met, newcomer=behind, restore=restore)
        except PeerFailedError:  # another is gone; the rest of these meet again
            if not met.connection.is_broken:
                raise  # of another world, as `restore` may know one
            world = met


def _check(restore: object, state: TrainState) -> None:
    if restore is None:
        return
    why = call_mismatch(restore, state) if callable(restore) else "it is none"
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
            f"{_REGROUP}: the state is in a part of a world, of {world.size} ranks. Regroup a"
            " state of the whole: af.with_world(state, world.whole)."
        )
        raise WorldError(msg)
    if world.axes:
        msg = (
            f"{_REGROUP}: the world has axes, {dict(world.axes)}, and without a rank they are not"
            " whole. Leave them out, or go on from the last checkpoint."
        )
        raise WorldError(msg)
    regrouping = world.connection.regrouping
    if regrouping is None:
        msg = (
            f"{_REGROUP}: the ranks of this world cannot meet anew. Start them with `accelfn"
            " launch --elastic MIN:MAX`, or simulate(size, fn, elastic=MIN)."
        )
        raise WorldError(msg)
    return regrouping


def _next_world(world: World) -> World:
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
