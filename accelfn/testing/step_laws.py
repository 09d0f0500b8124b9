# SPDX-License-Identifier: Apache-2.0
"""`check_step` and `check_resume`: the laws that every step keeps, held against a user's."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, TypeAlias, cast

import attrs
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from accelfn import TrainState, World, accumulate, chain, mean, wrap_fsdp
from accelfn import batches as batches_of
from accelfn.definition.transform import facts_of, has_field
from accelfn.errors import ArgumentError, CompositionError, LawError
from accelfn.errors import Warning as AdviceWarning
from accelfn.plug import arguments
from accelfn.testing.comparing import Comparison
from accelfn.testing.laws import (
    COMMON,
    OWN,
    History,
    Law,
    States,
    Subject,
    first_broken,
    leaves,
)
from accelfn.testing.simulate import simulate

Step: TypeAlias = Callable[[Any, Any], tuple[Any, Any]]


@arguments.explain_call_errors
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
    arguments.check_integer("check_step", "updates", updates, 2, "a number of updates")
    arguments.check_sizes("check_step", sizes)
    subjects = [_subject(step, states, batches, size, updates) for size in sizes]
    with warnings.catch_warnings():
        if batches is not None:  # the states' own data are not taken, as is meant
            warnings.simplefilter("ignore", AdviceWarning)
        _hold("the step", {"returns_states": _returns_states, **COMMON}, subjects)


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
    arguments.check_integer("check_resume", "steps", steps, 1, "a number of updates")
    arguments.check_sizes("check_resume", sizes)

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
    error = arguments.call_mismatch(function, None)
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


# Whether training depends on how an update is split: over ranks, micro-batches or rows.


_SPLITTING = frozenset({"data", "reduce", "engine", "layout"})
_RESULT = frozenset(
    {"loss", "loss_scale", "grads", "hyper", "after_update", "eval_params", "finalize"}
)
_DRAWING = ("loss", "value_and_grad", "module", "runner")
_NEAR = Comparison(rtol=1e-4, atol=1e-6)
_COARSE = Comparison(rtol=5e-2, atol=1e-3)
"""For what is computed in 16 bits or less, where each order of a sum rounds otherwise."""


_ADVICE = {
    "wrap_fsdp": " There tensors are DTensors: take a number of norm().full_tensor(), or say"
    ' that it does not go: refuses = {"layout": "..."}.',
    "micro-batches": " What needs a batch as a whole says so: refuses ="
    ' {"micro_batches": "..."}.',
}
"""What to do, by the way in which an update was split."""
_FAR = 0.4
"""How far, of the way, methods may go otherwise that send a part of a gradient later."""


Around: TypeAlias = Callable[..., chain]
"""Returns the whole setup around some transforms, of other parts where they are given."""


def split_law(members: Sequence[Any], around: Around) -> Law:
    """Return the law that a result does not depend on how an update is split.

    The reference is one rank that takes each update whole, without the transforms that only
    split it.
    """
    rough = "reduces_to_mean" in chain(*members).gives_up()
    lossy = rough or any("apart" in facts_of(each) for each in members)
    draws = any(has_field(each, field) for each in members for field in _DRAWING)
    whole = [each for each in members if lossy or not _only_splits(each)]

    def law(subject: Subject) -> str | None:
        if not subject.splits:
            return None
        with warnings.catch_warnings():
            # that all ranks take the same samples is meant
            warnings.simplefilter("ignore", AdviceWarning)
            wanted = _histories(subject, around(whole), 1)
            if isinstance(wanted, str):
                return f"on one rank, the run raised {wanted}"
            for how, setup in _split_setups(
                members, around, subject.size, lossy=lossy
            ).items():
                broken = _compare(subject, setup, wanted[0], rough=rough)
                if broken and draws:  # other numbers for each rank and micro-batch
                    again = _histories(subject, around(whole), 1, name="another")
                    if isinstance(again, str) or _differ(wanted[0], again, _NEAR):
                        return None
                if broken:
                    advice = "".join(_ADVICE[each] for each in _ADVICE if each in how)
                    return (
                        f"a run on one rank, and the same run {how}, {broken}{advice}"
                    )
        return None

    return law


def _compare(
    subject: Subject, setup: chain, wanted: History, *, rough: bool
) -> str | None:
    """Return how a run in a setup differs from what is wanted, or failed."""
    found = _histories(subject, setup, subject.size)
    if isinstance(found, str):
        return f"are not alike: the second raised {found}"
    if rough:
        off = max(_distance(wanted, history) for history in found)
        said = f"move the parameters by {off:.2g} of the way otherwise"
        return said if off > _FAR else None
    broken = _differ(wanted, found, _NEAR)
    if broken and _is_coarse(subject, setup):
        # whether scaled losses overflow depends on how large the sums of a part are
        scales = any(has_field(each, "loss_scale") for each in setup)
        broken = None if scales else _differ(wanted, found, _COARSE)
    return broken and f"differ {broken}"


def _distance(wanted: History, found: History) -> float:
    """Return how far parameters moved otherwise than wanted, relative to how far they moved."""

    def way(history: History) -> torch.Tensor:
        last, names = history[-1], [n for n in history[0] if n.startswith("params[")]
        return torch.cat([(last[n] - history[0][n]).flatten().double() for n in names])

    return float((way(found) - way(wanted)).norm() / way(wanted).norm())


def _only_splits(transform: Any) -> bool:
    """Whether a transform says how an update is split, and has no say in its result."""
    splits, results = (
        any(has_field(transform, field) for field in fields)
        for fields in (_SPLITTING, _RESULT)
    )
    return splits and not results


def _split_setups(
    members: Sequence[Any], around: Around, size: int, *, lossy: bool
) -> Mapping[str, chain]:
    """Return, by how a message calls it, the setups in which updates are split.

    Ranks that are to differ, or send a part of their gradients later, take the same samples.
    """
    splits = {f for f in _SPLITTING if any(has_field(m, f) for m in members)}
    several = f"on {size} ranks"
    wanted: dict[str, dict[str, Any]] = {}
    if size > 1 and lossy and "data" not in splits:
        wanted[f"{several} that all take the same samples"] = {"shares": None}
    if size > 1 and not lossy:
        wanted[f"{several} with their shares"] = {}
    if size > 1 and not lossy and not splits - {"data"}:
        wanted[f"{several} under wrap_fsdp"] = {"engine": wrap_fsdp()}
    if not lossy and "data" not in splits:
        how = f"{several} in two micro-batches" if size > 1 else "in two micro-batches"
        wanted[how] = {"outside": accumulate(num_micro_batches=2)}
    found: dict[str, chain] = {}
    for how, parts in wanted.items():
        try:
            found[how] = around(members, **parts)
        except CompositionError:
            continue  # it does not go there, and says so
    return found


def _histories(
    subject: Subject, setup: chain, size: int, *, name: str | None = None
) -> list[History] | str:
    """Return each rank's history in a setup, with means of metrics; or how it failed.

    Under another name, a state draws other random numbers.
    """
    within = subject.within(setup)

    def start(world: World) -> TrainState:
        state = within.start(world)
        name_of = attrs.evolve(state.definition, name=name or state.name)
        return attrs.evolve(state, definition=name_of)

    def advance(
        state: TrainState, done: int, number: int
    ) -> Iterator[tuple[TrainState, Any]]:
        for after, metrics in subject.advance(state, done, number):
            yield after, mean(metrics, after.world)

    split = attrs.evolve(subject, size=size, start=start, advance=advance)
    try:
        return split.histories()
    except Exception as error:  # noqa: BLE001 - whatever it is, the plain run had none
        return f"{type(error).__name__}: {error}"


def _differ(wanted: History, found: Sequence[History], near: Comparison) -> str | None:
    """Return the first difference of some ranks' histories from one, beyond rounding."""
    for rank, history in enumerate(found):
        for update, (one, other) in enumerate(zip(wanted, history, strict=True), 1):
            where = "at the end" if update == len(wanted) else f"after update {update}"
            names = [n for n in other if not n.startswith(OWN)]
            differences = near.by_name(
                {n: one[n] for n in names if n in one},
                {n: other[n] for n in names if n in one or "metrics" not in n},
            )
            for each in differences.values():
                return f"{where} on rank {rank}: {each[0]}"
    return None


class _Dtypes(TorchDispatchMode):
    """Notes whether an operator returned numbers of 16 bits or less."""

    found = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call an operator, and look at what it returns."""
        returned = func(*args, **(kwargs or {}))
        if isinstance(returned, torch.Tensor) and returned.dtype is not torch.bool:
            self.found = self.found or returned.dtype.itemsize < 4
        return returned


def _is_coarse(subject: Subject, setup: chain) -> bool:
    """Whether a setup rounds to 16 bits or less, in the first updates."""
    within = subject.within(setup)

    def rank(world: World) -> bool:
        state = within.start(world)
        with _Dtypes() as dtypes:
            for _ in within.advance(state, 0, 2):
                pass
        return dtypes.found

    return any(simulate(subject.size, rank))
