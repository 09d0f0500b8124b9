# SPDX-License-Identifier: Apache-2.0
"""The engine of a state: it is made at first use, once ranks have compared what they hold."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import nn

from accelfn.base.shards import is_shard
from accelfn.collectives import check_replicas
from accelfn.definition.definition import Definition
from accelfn.definition.fields import check_returned
from accelfn.engine.agreement import check_definitions
from accelfn.engine.engine import Engine
from accelfn.engine.home import Home, home_of
from accelfn.engine.module.made import made
from accelfn.engine.optimizer.in_backward import LiveUpdate
from accelfn.engine.optimizer.live_optimizer import LiveOptimizer
from accelfn.engine.optimizer.takes_updates import TakesUpdates
from accelfn.engine.runner import LocalRunner, Runner
from accelfn.schedules.advice import advise_of_rates
from accelfn.state.state import TrainState
from accelfn.structure.prototype import rebuilt

if TYPE_CHECKING:
    from accelfn.engine.compression import Compression

MakeRunner: TypeAlias = Callable[[nn.Module], Runner]
Innermost: TypeAlias = Callable[[nn.Module, LiveUpdate | None], Runner]


def engine_of(state: TrainState) -> Engine:
    """Return the engine of the state's definition, building it at first use."""
    cache, world = state.definition.cache, state.definition.world
    if cache.engine is None or cache.is_to_compare:
        state.lease.check()
        if world.is_main and cache.engine is None:
            advise_of_rates(state.definition.schedule)
        _compare(state)
        cache.is_to_compare = False
        if cache.engine is None:
            cache.engine = _built(state)
    return cache.engine


def build(
    state: TrainState,
    home: Home,
    innermost: Innermost,
    *,
    compression: "Compression | None" = None,
    optimizer: TakesUpdates | None = None,
) -> Engine:
    """Return an engine whose losses run in a home of the state's tensors.

    What takes the updates is the state's optimizer over them, or what is given. Around the
    innermost runner stand those of transforms, the leftmost outside.
    """
    definition, live = state.definition, None
    if optimizer is None:
        optimizer = _over_params(definition, home)
        if "steps_in_backward" in definition.setup.facts:
            live = LiveUpdate(optimizer, home.trained)
    module = made(home.module, state)

    def make_runner(module: nn.Module) -> Runner:
        return innermost(module, live)

    for each in reversed(definition.setup.owners["runner"]):
        make_runner = each.runner(make_runner, state)
        ok, what = callable(make_runner), "a function that makes a runner"
        check_returned(each, "runner", ok=ok, returned=make_runner, expected=what)
    runner = make_runner(module)
    if live is not None and not live.by_buckets:
        live.hook()
    return Engine(
        state,
        home,
        runner,
        module=module,
        optimizer=optimizer,
        live_update=live,
        compression=compression,
    )


def _compare(state: TrainState) -> None:
    """Raise unless ranks that train together, as the state says, hold the same.

    Raises:
        ReplicaMismatchError: their definitions or their parameters differ.
    """
    if _is_one_training(state):
        compare(state)


def _is_one_training(state: TrainState) -> bool:
    """Whether the setup says how gradients cross ranks; else the user's code may, or nothing."""
    owners = state.setup.owners
    reduces = owners["engine"] or owners["reduce"]
    return bool(reduces) or state.definition.layout is not None


def compare(state: TrainState) -> None:
    """Raise unless the ranks hold the same, and will do the same; once a definition.

    Ranks that may train apart can hold other parameters, but for the beginning.

    Cost: some small all-reduces (see `check_definitions` and `check_replicas`), once.

    Raises:
        ReplicaMismatchError: their definitions or their parameters differ.
    """
    definition, setup, world = state.definition, state.setup, state.world
    cache = definition.cache
    if world.size == 1 or (cache.is_compared and not cache.is_to_compare):
        return
    check_definitions(state)
    is_apart = "apart" in setup.facts or not _is_one_training(state)
    values = not is_apart or state.step == 0
    whole = {n: p for n, p in state.params.items() if not is_shard(p)}
    has_copies = world.axes.get("dp_replicate", 1) > 1
    check_replicas(
        state.params if has_copies else whole,
        world,
        label="compare replicas",
        values=values,
        trained=set(definition.skeleton.trainable),
    )
    if not values and definition.trains_apart:
        copy = definition.copy  # whose ranks agree at any time
        check_replicas(whole, copy, label="compare replicas", values=True)
    cache.is_compared = True


def _built(state: TrainState) -> Engine:
    """Return the engine that a transform gives, or one in which nothing crosses ranks."""
    chosen = state.setup.owners["engine"]
    if not (chosen and state.definition.copy.size > 1):
        return build(state, home_of(state), lambda module, _: LocalRunner(module))
    engine = chosen[0].engine(state)
    is_one = isinstance(engine, Engine)
    check_returned(
        chosen[0], "engine", ok=is_one, returned=engine, expected="an Engine"
    )
    return engine


def _over_params(definition: Definition, home: Home) -> LiveOptimizer:
    """Return a state's optimizer over the parameters of a home."""
    metas = definition.skeleton.module.named_parameters()
    memo: dict[int, Any] = {id(meta): home.params[name] for name, meta in metas}
    names = {param: name for name, param in home.params.items()}
    return LiveOptimizer(rebuilt(definition.optimizer, memo), names, home.shows)
