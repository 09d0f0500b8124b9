# SPDX-License-Identifier: Apache-2.0
"""`check_step` and `check_resume`: the laws that every step keeps, held against a user's."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, TypeAlias, cast

from accelfn.base.arguments import check_integer, check_sizes, why_not
from accelfn.base.calling import called
from accelfn.errors import ArgumentError, LawError
from accelfn.errors import Warning as AdviceWarning
from accelfn.loop.batches import batches as batches_of
from accelfn.state.state import TrainState
from accelfn.testing.checking.laws import COMMON, Law, first_broken
from accelfn.testing.checking.subject import States, Subject, leaves
from accelfn.testing.simulate import simulate
from accelfn.world import World

Step: TypeAlias = Callable[[Any, Any], tuple[Any, Any]]


@called
def check_step(
    step: Step,
    *,
    states: Callable[[World], States],
    batches: Callable[[World], Iterable[Any]] | None = None,
    sizes: Sequence[int] = (1, 2, 4),
    updates: int = 3,
) -> None:
    """Hold a step that you wrote against the laws that every step keeps.

    A step is `(states, batch) -> (states, metrics)`, over one TrainState or a tree of them
    (a tuple, dict or list): a GAN's two players, a student and a teacher. It runs in
    simulated worlds, on its states and on copies.

    | law | says |
    | --- | --- |
    | `returns_states` | it returns states like those it was given, none of them given away |
    | `memory_in_state` | the same state gives the same run, as often as it is run |
    | `leaves_settings` | torch's settings, such as the default dtype, stay as they are |
    | `no_environment` | environment variables, `RANK` say, change nothing |
    | `own_randomness` | the process's random generators are neither read nor moved |
    | `forks_apart` | a copy trains as its original does, while another trains in turns |
    | `any_schedule` | in whichever order ranks have their turns, the run is the same |
    | `replicas_agree` | ranks hold the same parameters, optimizer state and slots |
    | `resumes` | saved and loaded after any update, the run goes on bit by bit |

    Args:
        step: the step.
        states: makes the states of a world, before the first update.
        batches: makes the batches that a rank of a world steps over; at least `updates`.
            Default: `af.batches` of the first state.
        sizes: of the worlds.
        updates: how many are taken, at least 2.

    Raises:
        LawError: it breaks a law.
        ArgumentError: there are too few batches, or nothing to take them from; `states` is no
            function, or makes no states.
    """
    if not callable(step):
        msg = f"check_step({step!r}): expected a function (states, batch) -> (states, metrics)."
        raise ArgumentError(msg)
    if not callable(states):
        msg = (
            f"check_step(states=...): expected a function of a World that makes the states,"
            f" got {type(states).__name__}. Each run begins with states of its own:"
            " states=lambda world: af.TrainState.create(..., world=world)."
        )
        raise ArgumentError(msg)
    _check_takes_world("check_step(states=...)", states)
    check_integer("check_step", "updates", updates, 2, "a number of updates")
    check_sizes("check_step", sizes)
    subjects = [_subject(step, states, batches, size, updates) for size in sizes]
    with warnings.catch_warnings():
        if batches is not None:  # the states' own data are not taken, as is meant
            warnings.simplefilter("ignore", AdviceWarning)
        _hold("the step", {"returns_states": _returns_states, **COMMON}, subjects)


@called
def check_resume(
    make: Callable[[World], tuple[TrainState, Step]],
    steps: int,
    *,
    sizes: Sequence[int] = (1, 2, 4),
) -> None:
    """See that a run, saved and loaded after any update, goes on as if it had not been.

    The whole rest is compared bit by bit: batches by way of what they do, metrics, states.
    Ranks' numbers are added up as a ring does, in an order that depends on where they lie.

    Args:
        make: returns the state before the first update, with data, and its step.
        steps: updates to take; a cut is made before and after each of them.
        sizes: of the worlds.

    Raises:
        LawError: it differs; the text says after which cut, at which update, in what.
        ArgumentError: `make` is no function, or returns something else.

    Example:
        >>> import accelfn as af, torch
        >>> rows = torch.arange(24.0).view(8, 3)
        >>> def make(world):
        ...     state = af.TrainState.create(
        ...         model=lambda: torch.nn.Linear(3, 1),
        ...         optimizer=torch.optim.Adam,
        ...         data=af.Data(rows, batch_size=4),
        ...         setup=af.chain(af.shard_data(), af.wrap_ddp()),
        ...         world=world,
        ...     )
        ...     return state, af.make_step(lambda model, x: model(x).square().mean())
        >>> check_resume(make, 4)
    """
    if not callable(make):
        msg = (
            "check_resume(make): expected a function of a World that returns (state, step),"
            f" got {type(make).__name__}."
        )
        raise ArgumentError(msg)
    _check_takes_world("check_resume(make)", make)
    check_integer("check_resume", "steps", steps, 1, "a number of updates")
    check_sizes("check_resume", sizes)

    def advance(state: TrainState, done: int, number: int) -> Iterator[tuple[Any, Any]]:
        del done
        _, step = _state_and_step(make, state.world)
        for batch in islice(batches_of(state), number):
            state, metrics = step(state, batch)
            yield state, metrics

    subjects = [
        Subject(
            name=f"{size} ranks",
            size=size,
            updates=steps,
            start=lambda world: _state_and_step(make, world)[0],
            advance=advance,
        )
        for size in sizes
    ]
    _hold("the run", {"resumes": COMMON["resumes"]}, subjects)


def _check_takes_world(call: str, function: Callable[..., Any]) -> None:
    """Refuse a function that is not called with a world."""
    error = why_not(function, None)
    if error is not None:
        msg = (
            f"{call}: it is called with the World of a rank, which it does not take: {error}."
            " Write a function of a world, such as lambda world: ..."
        )
        raise ArgumentError(msg) from error


def _state_and_step(
    make: Callable[[World], tuple[TrainState, Step]], world: World
) -> tuple[TrainState, Step]:
    """Return what a user's function makes, if it is a state and its step."""
    match cast("Any", make(world)):
        case (TrainState() as state, step) if callable(step):
            return state, cast("Step", step)
        case made:
            msg = (
                f"check_resume: make returned {_kinds(made)}; expected (state, step): the"
                " TrainState before the first update, and its step."
            )
            raise ArgumentError(msg)


def _kinds(made: Any) -> str:
    """Return what something is, by types."""
    if not isinstance(made, (tuple, list)):
        return type(made).__name__
    parts = cast("Sequence[Any]", made)
    return f"({', '.join(type(each).__name__ for each in parts)})"


def _subject(
    step: Step,
    states: Callable[[World], States],
    batches: Callable[[World], Iterable[Any]] | None,
    size: int,
    updates: int,
) -> Subject:
    def advance(tree: States, done: int, number: int) -> Iterator[tuple[States, Any]]:
        first = leaves(tree)[0][1]
        given = batches_of(first) if batches is None else batches(first.world)
        begin = 0 if batches is None else done
        taken = 0
        for batch in islice(given, begin, begin + number):
            tree, metrics = step(tree, batch)
            taken += 1
            yield tree, metrics
        if taken < number:
            msg = f"check_step: there were {taken} batches, and {number} were to come."
            raise ArgumentError(msg)

    def start(world: World) -> States:
        made = states(world)
        kinds = {type(state) for _, state in leaves(made)}
        if not kinds or not all(issubclass(kind, TrainState) for kind in kinds):
            msg = (
                f"check_step: states(world) returned {_kinds(made)}; expected a TrainState,"
                " or a tuple, dict or list of them."
            )
            raise ArgumentError(msg)
        return made

    return Subject(
        name=f"{size} rank{'s' if size > 1 else ''}",
        size=size,
        updates=updates,
        start=start,
        advance=advance,
    )


def _hold(what: str, laws: dict[str, Law], subjects: Sequence[Subject]) -> None:
    for name, law in laws.items():
        broken = first_broken(law, subjects)
        if broken:
            msg = f"{what} breaks the law {name!r}: {broken}"
            raise LawError(msg)


def _returns_states(subject: Subject) -> str | None:
    """The step returns states like those it was given, none of them given away."""
    broken: list[str] = []

    def start(world: World) -> None:
        before = subject.start(world)
        kinds = [type(state).__name__ for _, state in leaves(before)]
        after, _ = next(subject.advance(before, 0, 1))
        found = [type(state).__name__ for _, state in leaves(after)]
        if found != kinds:
            broken.append(f"it was given {kinds} and returned {found}.")
        over = [
            place
            for place, (_, state) in enumerate(leaves(after))
            if isinstance(state, TrainState) and state.lease.is_over
        ]
        if over:
            broken.append(
                f"state {over[0]} of those that it returned was given to a step before."
                " Return what that step returned."
            )

    simulate(subject.size, start)
    return broken[0] if broken else None
