# SPDX-License-Identifier: Apache-2.0
"""`with_world` and `regroup`: move a state to another world, as by a checkpoint without a disk.

Each rank broadcasts the tensors that a save would write, and keeps those that a load would read.
So tensors are divided, resharded and merged by the same rules as in checkpoints.
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
from accelfn.checkpoint.elastic import Arrivals, Source, receive, sendings, to_merge
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
    """Return the state in another world; call it on all ranks of that world.

    Ranks that have a state send it to newcomers, which do not have one. Under `local_sgd`,
    for example, ranks may have different values. If the number of ranks stays the same, each
    rank keeps its own values. Otherwise all ranks get the mean, as with `load`. Communication
    that is still pending is completed first.

    Args:
        state: the state, which is not donated and not changed. A newcomer passes a new state of
            the same model, optimizer, setup and data. Only its definition is used.
        world: the world to continue in. It can have another number of ranks, and other axes.
        among: the world of all ranks that call this function, if there are more of them than in
            `world`. Ranks outside of `world` send their values too. `world` must be a part of
            `among`.
        newcomer: whether this rank has no state to send.

    Law: the result is bitwise that of `load` on the ranks of `world`, from a checkpoint that
    the sending ranks saved. A move to a world of equal size and back does not change a bit.

    Cost: first, BLAKE3 digests of each rank's tensors, as in a save. Then all tensors that a
    save would write are sent to all ranks: once if they are equal on all ranks, otherwise once
    per rank. Each rank keeps the tensors that it needs in host memory until all have arrived.
    Means are computed as tensors arrive. So the peak memory is the old state, twice the new
    state, and a few times 25 MB (or one tensor, if that is larger). A sharded model also needs
    memory for its parameters, and for the old shards if they are cut differently. If the
    number of ranks changes, every rank also keeps the slots that a transform merges (of
    PowerSGD or DiLoCo) of all ranks, because `merge` needs all of them.

    Raises:
        StateError: on all ranks, if no rank has a state, if parts of a sharded model are
            missing, or if a rank could not send or receive its tensors.
        CheckpointError: ranks have different values that cannot be averaged, or a newcomer's
            state has another definition.
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
    """Return the state in another world, as `with_world` does.

    Args:
        state: the state, which is not donated.
        world: the world to continue in.
        meeting: the world of all ranks that call this function.
        newcomer: whether this rank has no state to send.
        restore: a function that loads a checkpoint into a state and returns the result. It is
            called if parts of a sharded model are lost.
    """

    def say() -> commit.Contents | None:
        return None if newcomer else contents_of(state, "write")

    contents, descriptions = _run_on_all(
        "describe its state",
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
    fresh = _all_begin(state, world, meeting)

    def receive_all() -> Source:
        with arrivals.to_the_end():
            return receive(fresh, manifest, arrivals)

    task = "receive the state"
    source, _ = _run_on_all(task, meeting, receive_all, arrivals=arrivals)
    load = partial(restore_from, fresh, lambda: source)
    new_state, _ = _run_on_all("load the state", meeting, load)
    return new_state


def _all_begin(state: TrainState, world: World, meeting: World) -> TrainState:
    """Return a state to load into on all ranks, or raise an error on all ranks.

    Ranks do this in a separate phase, because a later load of a sharded model calls collectives,
    and a rank that failed before would not join them.
    """
    begin = partial(_fresh_state, state, world)
    fresh, _ = _run_on_all("prepare a state to load into", meeting, begin)
    return fresh


def _restore_lost(fresh: TrainState, restore: Restore, error: StateError) -> TrainState:
    """Return the state that `restore` loads, because parts of a sharded model are lost.

    Raises:
        StateError: `restore` did not load a state.
        ArgumentError: `restore` did not return a state.
    """
    result = restore(fresh)
    if not isinstance(result, TrainState):
        msg = (
            f"af.regroup(restore={restore!r}): it returned {type(result).__name__}; expected"
            " the loaded state. Pass store.restore, or functools.partial(af.load, directory=...)."
        )
        raise ArgumentError(msg)
    if result is fresh or result.world is not fresh.world:
        msg = f"{error} {restore=!r} did not load a checkpoint into its argument."
        raise StateError(msg) from error
    return result


def _check_worlds(world: World, among: World) -> World:
    """Return `among`, the world of all calling ranks; check that `world` is a part of it."""
    for candidate in (world, among):
        if not isinstance(candidate, World):
            msg = (
                f"{_CALL}: expected an af.World, got {candidate!r}. Pass a part of your world,"
                " such as world.split(size=...), or create one with af.World.from_env()."
            )
            raise ArgumentError(msg)
    if among is not world and among.whole is not world.whole:
        msg = (
            f"{_CALL}: `world`, with {world.size} ranks, is not a part of the world of"
            f" {among.size} ranks that you passed as among=."
        )
        raise ArgumentError(msg)
    return among


def _run_on_all(
    task: str,
    world: World,
    act: Callable[[], T],
    describe: Callable[[T], str] = lambda _: "",
    *,
    arrivals: Arrivals | None = None,
) -> tuple[T, list[str]]:
    """Run a phase on every rank; raise an error on every rank if it fails on one.

    Args:
        task: what ranks do, in words for errors.
        world: the ranks.
        act: does this rank's work.
        describe: turns this rank's result into a text for all ranks.
        arrivals: the broadcasts in `act`, if any.

    Returns: this rank's result, and the texts of all ranks.

    Raises:
        StateError: another rank failed.
        Exception: the error of this rank.
    """
    outcome: T | Exception
    try:
        outcome = act()
        text = f"{Verdict.DONE} {describe(outcome)}"
    except Exception as error:
        if arrivals is not None and arrivals.is_broken:
            raise  # this rank cannot communicate any longer
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
    """Return the manifest that a save would write, and the broadcasts of its tensors.

    If parts of a sharded model are lost, return an error instead, on all ranks.

    Raises:
        StateError: no rank has a state.
    """
    givers = [rank for rank, row in enumerate(descriptions) if row is not None]
    if not givers:
        msg = (
            f"{_CALL}: all {world.size} ranks are newcomers, so no rank has a state to send."
            " Load a checkpoint instead: af.load(state, directory)."
        )
        raise StateError(msg)
    tensors: Mapping[str, torch.Tensor] = {}
    shared: Mapping[str, Any] = {}
    if contents is not None:
        ranks = _renumber_copies([row for row in descriptions if row is not None])
        place = givers.index(world.rank)
        tensors, shared = commit.divide_writes(contents, ranks, place)
    text = json.dumps(attrs.asdict(files.describe_file(tensors)))
    texts = gather_text(text, world, label="with_world: list tensors")
    rank_files = [files.File.from_plain(json.loads(texts[rank])) for rank in givers]
    payload = None
    if world.rank == givers[0] and contents is not None:
        draft = commit.manifest_of(contents, shared, rank_files)
        merging = {n for r in draft.firsts for n in to_merge(state, draft, r)}
        payload = [draft.to_bytes().decode(), sorted(merging)]
    plain, merging = broadcast_object(
        payload, world, root=givers[0], label="with_world: send the manifest"
    )
    try:
        manifest = Manifest.from_bytes(plain.encode())
    except CheckpointCorruptError as error:
        failure = StateError(
            f"{_CALL}: the model is sharded, and the {len(givers)} ranks with a state do not"
            f" have all of its parts: {error.__cause__ or error}. Continue from the last"
            " checkpoint."
        )
        failure.__cause__ = error
        return failure
    return manifest, Arrivals(sendings(manifest, set(merging), givers), tensors, world)


def _renumber_copies(ranks: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the ranks' descriptions with new numbers for copies of the model.

    Some copies may be gone, and the numbers must not have gaps.
    """
    copies = sorted({rank["copy"] for rank in ranks if rank["copy"] is not None})
    numbers = {old: new for new, old in enumerate(copies)}
    return [{**rank, "copy": numbers.get(rank["copy"])} for rank in ranks]


def _fresh_state(state: TrainState, world: World) -> TrainState:
    """Return a state of the same definition in another world, to load into.

    If the setup shards the model, the state is sharded over the ranks of that world.
    """
    definition = attrs.evolve(state.definition, world=world)
    owners = state.setup.owners["layout"]
    if world.device != state.world.device:

        def move_whole(leaf: Any) -> Any:
            is_whole = isinstance(leaf, torch.Tensor) and not is_shard(leaf)
            return leaf.to(world.device) if is_whole else leaf

        slots = tree.tree_map(move_whole, dict(state.slots))
        state = attrs.evolve(state, slots=slots)
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


# `regroup`: after ranks have left or joined, continue in a world of all remaining and waiting
# ranks.


_REGROUP = "af.regroup(state)"


def regroup(state: TrainState, *, restore: Restore | None = None) -> TrainState:
    """Continue in a world of all ranks that are there, after ranks have left or joined.

    Use `regroup` in elastic runs, which you start with `accelfn launch --elastic` or simulate
    with `elastic=`. Call it on all ranks, at three moments:

    - At the start of training. A rank that replaces a failed rank waits here until the other
      ranks let it join, and receives their state. The other ranks continue at once.
    - Right after ranks have averaged their parameters. Pending communication is completed, and
      waiting ranks join. If no rank waits, `regroup` returns the state unchanged.
    - After a `PeerFailedError`. Pass the state that the last `regroup` returned; to have it
      then, train a copy of it. The remaining ranks continue from this state. Later updates are
      discarded and their samples are read again, so each sample of an epoch counts once.

    Ranks get new numbers in their old order. Batches, learning rate and the order of samples do
    not change. The old world is closed, and `state.world` is the new world.

    Args:
        state: the state, which is not donated. Ranks may pass states of different updates, for
            example if a rank failed while others completed an average. Then all ranks continue
            from the newest of these states.
        restore: a function that loads a checkpoint into a state and returns the result, such as
            the method `restore` of an `af.CheckpointStore`. It is called on all ranks, also on
            newcomers, if parts of a sharded model are lost. Updates since that checkpoint are
            repeated.

    Law: the ranks continue bitwise as if the remaining ranks had saved a checkpoint, and all
    ranks had loaded it in the new world. With `restore`, all ranks continue from the checkpoint
    that it loads.

    Cost: a broadcast of a few bytes if no rank waits. Otherwise the time to connect the ranks
    again, and the cost of `af.with_world`. The state that you keep for a failure needs the
    memory of a second state.

    Raises:
        PeerFailedError: pending communication failed, a running rank did not arrive within the
            world's timeout, or there are fewer ranks than the minimum.
        StateError: parts of a sharded model are lost, and there is no `restore`, or it did not
            load a checkpoint.
        WorldError: the run is not elastic, the state's world has axes, or it is a part of
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
    tree.tree_leaves(state.slots)  # this waits for pending communication
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
        except PeerFailedError:  # another rank failed: form a new world without it
            if not target.connection.is_broken:
                raise  # the error is from another world, in `restore`
            world = target


def _check(restore: object, state: TrainState) -> None:
    if restore is None:
        return
    why = call_mismatch(restore, state) if callable(restore) else "it is not callable"
    if why is not None:
        text = restore if callable(restore) else type(restore).__name__
        msg = (
            f"af.regroup(state, restore={text}): cannot call restore(state): {why}. Pass a function"
            " that loads a checkpoint into a state, such as store.restore."
        )
        raise ArgumentError(msg)


def _regrouping_of(world: World) -> Any:
    """Return the object that lets the ranks of a world form a new world.

    Raises:
        WorldError: the world cannot regroup.
    """
    if world.whole is not world:
        msg = (
            f"{_REGROUP}: the state's world, of {world.size} ranks, is a part of another world."
            " Move the state to the whole world first: af.with_world(state, world.whole)."
        )
        raise WorldError(msg)
    if world.axes:
        msg = (
            f"{_REGROUP}: a world with axes, {dict(world.axes)}, cannot regroup. Create the"
            " world without axes=, or continue from the last checkpoint."
        )
        raise WorldError(msg)
    regrouping = world.connection.regrouping
    if regrouping is None:
        msg = (
            f"{_REGROUP}: this run is not elastic, so its ranks cannot form a new world. Start"
            " it with `accelfn launch --elastic MIN:MAX`, or simulate(size, fn, elastic=MIN)."
        )
        raise WorldError(msg)
    return regrouping


def _next_world(world: World) -> World:
    """Return the world to continue in: the same world if no rank has left or waits to join."""
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
