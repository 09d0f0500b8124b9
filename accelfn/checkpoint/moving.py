# SPDX-License-Identifier: Apache-2.0
"""`with_world` and `regroup`: move a state to another world like a checkpoint, without a disk.

Each rank broadcasts the tensors that a save would write, and keeps those that a load would read.
So the rules for dividing, resharding and merging are those of checkpoints.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias, TypeVar

import attrs
import torch

from accelfn.base import tree
from accelfn.base.arguments import call_mismatch
from accelfn.base.tree import is_shard
from accelfn.checkpoint import commit, files
from accelfn.checkpoint.commit import Verdict
from accelfn.checkpoint.elastic import Arrivals, receive, sendings, to_merge
from accelfn.checkpoint.load import restore_from
from accelfn.checkpoint.manifest import Manifest
from accelfn.checkpoint.save import contents_of
from accelfn.collectives.packed import gather_text
from accelfn.collectives.trees import broadcast_object
from accelfn.definition.definition import check_axes
from accelfn.definition.transform import chain
from accelfn.errors import (
    ArgumentError,
    CheckpointCorruptError,
    PeerFailedError,
    StateError,
    WorldError,
)
from accelfn.state.results import Lease
from accelfn.state.state import TrainState, check_state
from accelfn.world import World

T = TypeVar("T")
Restore: TypeAlias = Callable[[TrainState], TrainState]

_CALL = "af.with_world(state, world)"


def with_world(
    state: TrainState,
    world: World,
    *,
    among: World | None = None,
    newcomer: bool = False,
) -> TrainState:
    """Move the state to another world; call it on all ranks of that world.

    Ranks that have a state send it, and newcomers receive it. Values that differed between
    ranks, as between two averages of `local_sgd`, return to each rank if the number of ranks is
    the same; otherwise all ranks get the mean, as with `load`. Pending communication completes
    first.

    Args:
        state: not donated and not changed. A newcomer passes a fresh state of the same model,
            optimizer, setup and data; only its definition is used.
        world: the world to continue in. It can have more, fewer or as many ranks, and other
            axes.
        among: the world of all ranks that call this, if these are more than the ranks of
            `world`. Ranks that will not continue still send their values. `world` must be a
            part of it.
        newcomer: whether this rank has no state to send.

    Law: the result is bitwise the result of `load` on the ranks of `world`, from a checkpoint
    that the sending ranks saved. Moving to a world of as many ranks and back gives the same
    bits.

    Cost: BLAKE3 of a rank's tensors, as in a save. Then all tensors that a save would write are
    sent to all ranks: equal values once, differing values for each rank. A rank keeps its share
    in host memory until it is complete; means are summed on arrival. So the peak is the old
    state, the new state, the new state once more, and a few times 25 MB, or one tensor if that
    is larger. A split model also needs room for its parameters, and for the old parts if they
    are cut differently. If the number of ranks changes, slots that a transform merges
    (PowerSGD's, DiLoCo's) are kept for every rank, because `merge` takes all of them.

    Raises:
        StateError: on all ranks: no rank has a state, parts of a split model are missing, or
            a rank could not send or receive its part.
        CheckpointError: ranks have different values without a mean, or a newcomer's state has
            another definition.
        WorldError: no transform uses an axis of the world.
        ArgumentError: `world` is not a world, or is not a part of `among`.
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
    """Move the state to another world, as `with_world`.

    Args:
        state: not donated.
        world: the world to continue in.
        meeting: the world of all ranks that call this.
        newcomer: whether this rank has no state to send.
        restore: loads the state to continue with if parts of a split model are lost; takes a
            state of the definition to load into.
    """

    def say() -> commit.Contents | None:
        return None if newcomer else contents_of(state, "write")

    contents, descriptions = _run_on_all(
        "say what it holds",
        meeting,
        say,
        lambda contents: json.dumps(contents and commit.describe_contents(contents)),
    )
    handover = _hand_over(contents, list(map(json.loads, descriptions)), meeting, state)
    if isinstance(handover, StateError):
        if restore is None:
            raise handover
        return _restore_lost(_all_begin(state, world, meeting), restore, handover)
    manifest, arrivals = handover
    where = f"the state of update {manifest.step}"
    fresh = _all_begin(state, world, meeting)

    def take() -> TrainState:
        with arrivals.to_the_end():
            return restore_from(
                fresh, where, lambda: receive(fresh, manifest, where, arrivals)
            )

    new_state, _ = _run_on_all(
        "take the state over",
        meeting,
        take,
        can_tell=lambda: not arrivals.is_broken,
    )
    return new_state


def _all_begin(state: TrainState, world: World, meeting: World) -> TrainState:
    """Return a state to load into, on all ranks, or raise on all ranks.

    A separate step, because loading a split model calls collectives, which a rank that failed
    here would not join.
    """
    begin = partial(_fresh_state, state, world)
    fresh, _ = _run_on_all("begin anew", meeting, begin)
    return fresh


def _restore_lost(fresh: TrainState, restore: Restore, error: StateError) -> TrainState:
    """Return the state that `restore` loads if parts of a model are lost.

    Raises:
        StateError: `restore` has no state to load.
        ArgumentError: `restore` returned something else.
    """
    result = restore(fresh)
    if not isinstance(result, TrainState):
        msg = (
            f"restore={restore!r} gave {type(result).__name__}; expected the state that it"
            " loaded, as store.restore and partial(af.load, directory=...) give it."
        )
        raise ArgumentError(msg)
    if result is fresh or result.world is not fresh.world:
        msg = f"{error} restore={restore!r} has loaded nothing into the state given."
        raise StateError(msg) from error
    return result


def _check_worlds(world: World, among: World) -> World:
    """Return the world of all calling ranks; check that `world` is a part of it."""
    for candidate in (world, among):
        if not isinstance(candidate, World):
            msg = (
                f"{_CALL}: expected an af.World, got {candidate!r}. Take a part of yours, as"
                " world.split(size=...), or make one with af.World.from_env()."
            )
            raise ArgumentError(msg)
    if among is not world and among.whole is not world.whole:
        msg = (
            f"{_CALL}: the world of {world.size} ranks is not a part of the world of"
            f" {among.size} ranks that was given as among=."
        )
        raise ArgumentError(msg)
    return among


def _run_on_all(
    task: str,
    world: World,
    act: Callable[[], T],
    describe: Callable[[T], str] = lambda _: "",
    *,
    can_tell: Callable[[], bool] = lambda: True,
) -> tuple[T, list[str]]:
    """Act on every rank; return this rank's outcome and all ranks' descriptions, or raise.

    `can_tell` returns whether this rank can still communicate after an error of the act.

    Raises:
        StateError: another rank failed.
        Exception: the error of this rank.
    """
    outcome: T | Exception
    try:
        outcome = act()
        text = f"{Verdict.DONE} {describe(outcome)}"
    except Exception as error:
        if not can_tell():
            raise
        outcome, text = error, f"{Verdict.FAILED} {commit.format_error(error)}"
    texts = gather_text(text, world, label=f"with_world: {task}")
    if isinstance(outcome, Exception):
        raise outcome
    results: list[str] = []
    for rank, row in enumerate(texts):
        verdict, _, message = row.partition(" ")
        if verdict != Verdict.DONE:
            msg = f"{_CALL}: rank {rank} of {world.size} could not {task}: {message}"
            raise StateError(msg)
        results.append(message)
    return outcome, results


def _hand_over(
    contents: commit.Contents | None,
    descriptions: Sequence[Mapping[str, Any] | None],
    world: World,
    state: TrainState,
) -> tuple[Manifest, Arrivals] | StateError:
    """Return the manifest that a save would write, and the arrivals of its tensors.

    Or return, on all ranks, the error that parts of a split model are lost.

    Raises:
        StateError: no rank has a state.
    """
    givers = [rank for rank, row in enumerate(descriptions) if row is not None]
    if not givers:
        msg = (
            f"{_CALL}: all {world.size} ranks are newcomers, so there is no state to take"
            " over. Load one: af.load(state, directory)."
        )
        raise StateError(msg)
    tensors: Mapping[str, torch.Tensor] = {}
    division = None
    if contents is not None:
        ranks = _renumber_copies([row for row in descriptions if row is not None])
        division = commit.divide_writes(contents, ranks, givers.index(world.rank))
        tensors = division.mine
    text = json.dumps(attrs.asdict(files.describe_file(tensors)))
    texts = gather_text(text, world, label="with_world: list tensors")
    rank_files = [files.File.from_plain(json.loads(texts[rank])) for rank in givers]
    payload = None
    if world.rank == givers[0] and division is not None and contents is not None:
        draft = division.manifest(contents, rank_files, step=state.step)
        merging = {n for r in draft.firsts for n in to_merge(state, draft, r)}
        payload = [draft.to_bytes().decode(), sorted(merging)]
    plain, merging = broadcast_object(
        payload, world, root=givers[0], label="with_world: say what there is"
    )
    try:
        manifest = Manifest.from_bytes(plain.encode())
    except CheckpointCorruptError as error:
        failure = StateError(
            f"{_CALL}: the {len(givers)} ranks that have a state have not all of it:"
            f" {error}. Continue from the last checkpoint."
        )
        failure.__cause__ = error
        return failure
    return manifest, Arrivals(sendings(manifest, set(merging), givers), tensors, world)


def _renumber_copies(ranks: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return ranks' descriptions with copies renumbered: some copies may be gone."""
    copies = sorted({rank["copy"] for rank in ranks if rank["copy"] is not None})
    return [
        {**rank, "copy": None if rank["copy"] is None else copies.index(rank["copy"])}
        for rank in ranks
    ]


def _fresh_state(state: TrainState, world: World) -> TrainState:
    """Return a state of the same definition in a world, to load into.

    If the setup shards the model, the state is sharded for that world.
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
        part = zeros if layout is None else layout.cut(name, zeros)
        params[name] = part if is_shard(part) else part.to(world.device)
    transforms = {transform.name for transform in state.setup}
    user_slots = {
        name: slot
        for name, slot in state.slots.items()
        if name not in transforms and not any(map(is_shard, tree.tree_leaves(slot)))
    }
    fresh = attrs.evolve(
        state,
        params=params,
        buffers={n: b.to(world.device) for n, b in state.buffers.items()},
        opt_state={},
        slots=user_slots,
        definition=attrs.evolve(definition, setup=chain(*owners)),
        lease=Lease(),
    )
    return fresh.with_setup(state.setup)


def _slots_on_device(slots: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Return slots on a device, except for sharded tensors."""

    def copy_part(leaf: Any) -> Any:
        is_whole = isinstance(leaf, torch.Tensor) and not is_shard(leaf)
        return leaf.to(device) if is_whole else leaf

    return {name: tree.tree_map(copy_part, slot) for name, slot in slots.items()}


# Regrouping: continue in the world of all present ranks.


_REGROUP = "af.regroup(state)"


def regroup(state: TrainState, *, restore: Restore | None = None) -> TrainState:
    """Continue in the world of all present ranks, after ranks have left or joined.

    For elastic runs, under `accelfn launch --elastic` or simulated with `elastic=`. Call it on
    all ranks, at three moments:

    - At the start of training. A rank that replaces a failed rank waits here until the other
      ranks admit it, and receives their state. The other ranks continue at once.
    - Right after ranks have averaged. Pending communication completes, and waiting ranks join.
      If no rank waits, `regroup` returns the state unchanged.
    - After a `PeerFailedError`. Pass the state that the last `regroup` returned (train a copy
      of it); the remaining ranks continue from it. Later updates are discarded and their
      samples are read again, so each epoch is covered once.

    Ranks are renumbered in their old order. Batches, learning rate and the order of samples do
    not change. The old world is closed; `state.world` is the new one.

    Args:
        state: not donated. If ranks pass states of different updates, as when a rank failed
            while others completed an average, all ranks take over the newest.
        restore: loads a checkpoint if the model is split and parts of it are lost, such as
            `store.restore` of an `af.CheckpointStore`. It takes a state to load into, and is
            called on all ranks, newcomers too. Updates since that checkpoint are repeated.

    Law: the remaining ranks continue bitwise as if they had saved their states as a checkpoint
    and loaded it in the new world; newcomers load it as well. With `restore`, all ranks
    continue from the checkpoint that it loads.

    Cost: a broadcast of a few bytes if no rank waits. Otherwise ranks connect again, and then
    the cost of `af.with_world`. Keeping a state takes the memory of a second state.

    Raises:
        PeerFailedError: pending communication failed, a live rank did not arrive within the
            world's timeout, or fewer ranks remain than the minimum.
        StateError: parts of a split model are lost, and there is no `restore`, or it has
            nothing to load.
        WorldError: the run is not elastic, or the state's world has axes, or is a part of
            another world.

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
    tree.tree_leaves(state.slots)  # waits for pending communication, or raises
    world = state.world
    newcomer = _regrouping_of(world).is_newcomer
    while True:
        target = _next_world(world)
        if target is world:
            return state
        try:
            text = "" if newcomer else str(state.step)
            steps = gather_text(text, target, label="regroup: who has the newest state")
            newest = max((int(step) for step in steps if step), default=0)
            behind = newcomer or state.step < newest
            return move(state, target, target, newcomer=behind, restore=restore)
        except PeerFailedError:  # another rank failed: the remaining ranks meet again
            if not target.connection.is_broken:
                raise  # an error of another world, which `restore` may use
            world = target


def _check(restore: object, state: TrainState) -> None:
    if restore is None:
        return
    why = call_mismatch(restore, state) if callable(restore) else "it is not callable"
    if why is not None:
        text = restore if callable(restore) else type(restore).__name__
        msg = (
            f"af.regroup(state, restore={text}): expected a function that takes a state and"
            f" loads into it, as store.restore of an af.CheckpointStore: {why}."
        )
        raise ArgumentError(msg)


def _regrouping_of(world: World) -> Any:
    """Return the object that lets the ranks of a world meet again.

    Raises:
        WorldError: the world cannot regroup.
    """
    if world.whole is not world:
        msg = (
            f"{_REGROUP}: the state is in a part of a world, of {world.size} ranks. Regroup a"
            " state of the whole: af.with_world(state, world.whole)."
        )
        raise WorldError(msg)
    if world.axes:
        msg = (
            f"{_REGROUP}: the world has axes, {dict(world.axes)}. Leave them out, or continue"
            " from the last checkpoint."
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
    """Return the world after regrouping: this one if no rank left and none waits to join."""
    regrouping = _regrouping_of(world)
    if not regrouping.is_newcomer and not world.connection.is_broken:
        try:
            is_awaited = broadcast_object(
                regrouping.is_awaited(), world, label="regroup: ask who waits"
            )
        except PeerFailedError:
            is_awaited = True
        if not is_awaited:
            return world
    return regrouping.meet(world)
