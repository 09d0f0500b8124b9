# SPDX-License-Identifier: Apache-2.0
"""Whether what a transform tells of itself is so."""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from accelfn.definition.facts import facts_of
from accelfn.definition.transform import chain
from accelfn.errors import NonFiniteGradsError
from accelfn.loop.batches import batches
from accelfn.step.make_step import make_step
from accelfn.testing.checking.laws import Law, differ
from accelfn.testing.checking.subject import Subject
from accelfn.testing.checking.watching import subclassed
from accelfn.testing.simulate import simulate
from accelfn.world import World

# torch has no public name for whether a backward pass runs
# pyright: reportPrivateUsage=false

Around: TypeAlias = Callable[[Sequence[Any]], chain]
"""Returns the whole setup around some transforms."""


def fact_law(members: Sequence[Any], around: Around) -> Law:
    """Return the law that each fact that can be tried is so, and is told where it is so."""
    told = {fact for each in members for fact in facts_of(each)}
    laws: Mapping[str, Law] = {
        "draws_nothing": lambda subject: _draws(subject, members, around),
        "by_rank": lambda subject: _no_entry(subject, members),
        "judges_finite": _not_judged,
        "micro_batches": lambda subject: _other_parts(subject, members, around),
    }

    def law(subject: Subject) -> str | None:
        found = (held(subject) for name, held in laws.items() if name in told)
        return _recomputes(subject, told=told) or next(filter(None, found), None)

    return law


def _draws(subject: Subject, members: Sequence[Any], around: Around) -> str | None:
    """With draws of its own for each method, the run of one that draws nothing is the same."""
    forced = [
        subclassed(each, {"tells": {**facts_of(each), "draws_nothing": False}})
        for each in members
    ]
    again = subject.within(around(forced)).histories()
    said = "a run, and the same run with random numbers for each method,"
    broken = differ(subject.plain, again, said)
    return f"{broken} It draws: do not tell draws_nothing." if broken else None


def _no_entry(subject: Subject, members: Sequence[Any]) -> str | None:
    """What differs by rank is an entry of the slot."""

    def rank(world: World) -> dict[str, Any]:
        return dict(subject.start(world).slots)

    slots = simulate(1, rank)[0]
    for each in members:
        for name in facts_of(each).get("by_rank", ()):
            slot = slots.get(each.name)
            if slot is not None and not (isinstance(slot, Mapping) and name in slot):
                return f"it tells that {name!r} differs by rank, which its slot lacks."
    return None


def _loss(model: nn.Module, batch: Any, factor: float) -> torch.Tensor:
    inputs, targets = batch
    return (model(inputs) - targets).square().sum(1).mean() * factor


def _not_judged(subject: Subject) -> str | None:
    """A loss that is infinite leaves all parameters finite, or is refused."""

    def rank(world: World) -> bool:
        state, step = subject.start(world), make_step(_loss)
        for number, batch in enumerate(islice(batches(state), 3)):
            try:
                state, _ = step(state, batch, math.inf if number == 1 else 1.0)
            except NonFiniteGradsError:
                break
        return all(bool(param.isfinite().all()) for param in state.params.values())

    if all(simulate(subject.size, rank)):
        return None
    return (
        "it tells that it judges what is finite, but after a loss that was infinite"
        " parameters are not: an update whose gradients are not finite is to be skipped."
    )


def _recomputes(subject: Subject, *, told: set[str]) -> str | None:
    """Modules run again in the backward pass if it is told, and only then."""
    if "compiles" in told:
        return None  # a graph calls no function
    plain, found = _run_again(subject, chain()), _run_again(subject, None)
    if found > plain and "recomputes" not in told:
        return "it runs modules again, and does not tell recomputes."
    if found <= plain and "recomputes" in told:
        return "it tells recomputes, but no module ran again."
    return None


class _Layers(TorchFunctionMode):
    """Counts what the layers of a model call in a backward pass."""

    count = 0

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Count a layer's function, and call it."""
        self.count += func in _LAYERS and torch._C._current_graph_task_id() >= 0
        return func(*args, **(kwargs or {}))


_LAYERS = (nn.functional.linear, nn.functional.dropout, torch.tanh)


def _run_again(subject: Subject, setup: chain | None) -> int:
    """Return how many layers run in the backward pass, in the first update."""

    def rank(world: World) -> int:
        state = subject.start(world)
        state = state if setup is None else state.with_setup(setup)
        batch = next(iter(batches(state)))
        with _Layers() as layers:
            make_step(_loss)(state, batch, 1.0)
        return layers.count

    return simulate(1, rank)[0]


def _other_parts(
    subject: Subject, members: Sequence[Any], around: Around
) -> str | None:
    """It has as many backward passes as it tells parts of a batch."""
    losses = 0

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        nonlocal losses
        losses += 1
        return _loss(model, batch, 1.0)

    def rank(world: World) -> int:
        state = subject.start(world).with_setup(around(members))
        batch = next(iter(batches(state)))
        (parts_of,) = state.setup.facts["micro_batches"]
        make_step(loss)(state, batch)
        return len(parts_of(batch))

    told = simulate(1, rank)[0]
    if told == losses:
        return None
    return (
        f"it tells {told} micro_batches of a batch, and had {losses} backward passes."
    )
