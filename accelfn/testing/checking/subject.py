# SPDX-License-Identifier: Apache-2.0
"""What laws are held against: training that can be begun, advanced, copied and saved."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import attrs

from accelfn.base import tree
from accelfn.checkpoint import load, save
from accelfn.definition.facts import by_rank
from accelfn.state.state import TrainState
from accelfn.testing.comparing.entries import entries
from accelfn.testing.simulate import simulate
from accelfn.world import World

History: TypeAlias = list[Mapping[str, Any]]
"""What training held and reported after each update, and what it held at its end."""
States: TypeAlias = Any
"""A TrainState, or a tree of them."""
Advance: TypeAlias = Callable[[States, int, int], Iterator[tuple[States, Any]]]


def _nothing(states: States) -> Mapping[str, Any]:
    del states
    return {}


@attrs.frozen(kw_only=True)
class Subject:
    """Training on simulated ranks, whose sums depend on where numbers lie, as a ring's do.

    Attributes:
        name: how a message calls it.
        size: the number of ranks.
        updates: how many are taken.
        start: gives the states before the first update, of a world.
        advance: `(states, done, number)` yields states and metrics of the next updates.
        begin: gives them in a setup, of a world and the setup, where there is one.
        end: what else is compared of the last states, by name.
        splits: whether its result is the same however an update is split: without draws and
            batch statistics.
        num_cuts: after how many of the updates it is saved and loaded, at most.
    """

    name: str
    size: int
    updates: int
    start: Callable[[World], States]
    advance: Advance
    begin: Callable[[World, Any], States] | None = None
    end: Callable[[States], Mapping[str, Any]] = _nothing
    splits: bool = False
    num_cuts: int | None = None
    _kept: list[list[History]] = attrs.field(init=False, factory=list, repr=False)

    @property
    def cuts(self) -> Sequence[int]:
        """After how many updates it is saved and loaded: all numbers, or some of them."""
        every, most = range(self.updates + 1), self.num_cuts
        if most is None or len(every) <= most:
            return every
        # the first and the last three, and as many as there may be between
        between = range(1, len(every) - 3)
        taken = max(1, most - 4)
        chosen = {between[len(between) * i // taken] for i in range(taken)}
        return [0, *sorted(chosen), *every[-3:]]

    @property
    def plain(self) -> list[History]:
        """Each rank's history, uninterrupted; run once."""
        if not self._kept:
            self._kept.append(self.histories())
        return self._kept[0]

    def within(self, setup: Any) -> "Subject":
        """Return the same training in another setup."""
        assert self.begin is not None  # noqa: S101 - what is a transform's begins in any setup
        begin = self.begin

        def start(world: World) -> States:
            return begin(world, setup)

        return attrs.evolve(self, start=start)

    def histories(
        self, *, seed: int = 0, schedule: Sequence[int] = ()
    ) -> list[History]:
        """Return each rank's history, uninterrupted."""

        def rank(world: World) -> History:
            return self._whole(self.start(world), 0, self.updates)

        return list(self._simulated(rank, seed=seed, schedule=schedule))

    def cut(self, at: int, folder: Path) -> list[History]:
        """Return each rank's history, saved and loaded after some updates."""
        heads = self.saved(at, folder)
        tails = self.resumed(at, folder)
        return [head + tail for head, tail in zip(heads, tails, strict=True)]

    def saved(self, at: int, folder: Path) -> list[History]:
        """Return each rank's history of the first updates, and save the states after them."""

        def rank(world: World) -> History:
            states = self.start(world)
            history: History = []
            for after, metrics in self.advance(states, 0, at):
                states = after
                history.append(held(states, metrics))
            for name, state in leaves(states):
                save(state, folder / name)
            return history

        return list(self._simulated(rank))

    def resumed(self, at: int, folder: Path) -> list[History]:
        """Return each rank's history from saved states on."""

        def rank(world: World) -> History:
            start = self.start(world)
            paths = (folder / name for name, _ in leaves(start))
            again = tree.tree_map(lambda new: load(new, next(paths)), start)
            return self._whole(again, at, self.updates - at)

        return list(self._simulated(rank))

    def fork(self) -> list[History]:
        """Return a history that goes on with a copy after update 1, whose twin trains too.

        The twin has other parameters, and takes each of its updates right after.
        """

        def rank(world: World) -> History:
            states, history = self.start(world), list[Mapping[str, Any]]()
            for after, metrics in self.advance(states, 0, 1):
                states = after
                history.append(held(states, metrics))
            copies = [tree.tree_map(fork, states) for fork in (TrainState.copy, _twin)]
            run, twin = (self.advance(copy, 1, self.updates - 1) for copy in copies)
            for after, metrics in run:
                next(twin, None)
                history.append(held(after, metrics))
            return history

        return list(self._simulated(rank))

    @property
    def _simulated(self) -> Callable[..., Sequence[Any]]:
        return partial(simulate, self.size, sums="ring")

    def _whole(self, states: States, done: int, number: int) -> History:
        history: History = []
        for after, metrics in self.advance(states, done, number):
            states = after
            history.append(held(states, metrics))
        return [*history, {**held(states, {}), **self.end(states)}]


OWN = "own "
"""Begins the name of what is a rank's own, as its transform tells."""


def _twin(state: TrainState) -> TrainState:
    """Return a copy with other parameters."""
    moved = {
        n: p * 1.25 if p.is_floating_point() else p for n, p in state.params.items()
    }
    return state.copy().with_params(moved)


def leaves(states: States) -> list[tuple[str, TrainState]]:
    """Return the states of a tree, numbered by their place."""
    found: list[TrainState] = []
    tree.tree_map(found.append, states)
    return [(f"state-{place}", state) for place, state in enumerate(found)]


def held(states: States, metrics: Any) -> dict[str, Any]:
    """Return all that states hold and metrics say, by name."""
    found: dict[str, Any] = {}
    several = len(leaves(states)) > 1
    for name, state in leaves(states):
        prefix = f"{name}." if several else ""
        own = [f"slots[{slot!r}][{entry!r}]" for slot, entry in by_rank(state.setup)]
        for path, leaf in entries(state, gather=True).items():
            is_own = path.startswith(tuple(own))
            found[f"{prefix}{OWN if is_own else ''}{path}"] = leaf
    if isinstance(metrics, Mapping):
        found |= {f"metrics[{name!r}]": value for name, value in metrics.items()}
    elif metrics is not None:
        found |= {
            f"metrics ({i})": t for i, t in enumerate(tree.tensor_leaves(metrics))
        }
    return found
