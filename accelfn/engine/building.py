# SPDX-License-Identifier: Apache-2.0
"""The engine of a state: it is made at first use, once ranks have compared what they hold."""

from accelfn.base.shards import is_shard
from accelfn.collectives import check_replicas
from accelfn.definition.fields import check_returned
from accelfn.engine.agreement import check_definitions
from accelfn.engine.engine import Engine
from accelfn.engine.home import home_of
from accelfn.engine.runner import LocalRunner
from accelfn.schedules.advice import advise_of_rates
from accelfn.state.state import TrainState


def engine_of(state: TrainState) -> Engine:
    """Return the engine of the state's definition, building it at first use."""
    cache, world = state.definition.cache, state.definition.world
    if cache.engine is None:
        state.lease.check()
        if world.is_main:
            advise_of_rates(state.definition.schedule)
        _compare(state)
        cache.engine = _built(state)
    return cache.engine


def _compare(state: TrainState) -> None:
    """Raise unless ranks that train together hold the same.

    Raises:
        ReplicaMismatchError: their definitions or their parameters differ.
    """
    definition, setup, world = state.definition, state.setup, state.world
    reduces = setup.owners["engine"] or setup.owners["reduce"]
    if world.size == 1 or not (reduces or definition.layout is not None):
        return
    check_definitions(state)
    values = "apart" not in setup.facts or state.step == 0
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


def _built(state: TrainState) -> Engine:
    """Return the engine that a transform gives, or one in which nothing crosses ranks."""
    chosen = state.setup.owners["engine"]
    if not (chosen and state.definition.copy.size > 1):
        return Engine(state, home_of(state), lambda module, _: LocalRunner(module))
    engine = chosen[0].engine(state)
    is_one = isinstance(engine, Engine)
    check_returned(
        chosen[0], "engine", ok=is_one, returned=engine, expected="an Engine"
    )
    return engine
