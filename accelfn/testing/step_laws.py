# SPDX-License-Identifier: Apache-2.0
"""`check_step` and `check_resume`: check that your step keeps the laws that all steps must keep."""

import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any, TypeAlias, cast

import attrs
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from accelfn import Batch, TrainState, Update, World, accumulate, chain, wrap_fsdp
from accelfn import batches as batches_of
from accelfn import transform as transform_of
from accelfn.errors import AccelfnWarning, ArgumentError, CompositionError, LawError
from accelfn.plug import arguments, tree
from accelfn.testing.comparing import Comparison, first_difference
from accelfn.testing.laws import (
    COMMON,
    NEARLY_EQUAL,
    OWN,
    History,
    Law,
    States,
    Subject,
    first_broken,
    moment,
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
    """Check that a step that you wrote keeps the laws that all steps must keep.

    A step is a function `(states, batch) -> (states, metrics)`. Its states are one TrainState, or
    a tuple, dict or list of TrainStates, such as the two players of a GAN. `check_step` runs the
    step in simulated worlds, with the states and with copies of the states.

    | law | property |
    | --- | --- |
    | `returns_states` | the step returns states of the same types as it got, and no state that \
was already passed to a step |
    | `memory_in_state` | if a run starts again from the same state, it gives the same results |
    | `leaves_settings` | the step does not change torch's settings, such as the default dtype |
    | `no_environment` | environment variables, such as `RANK`, do not change the run |
    | `own_randomness` | the step does not use or advance the random generators of the process |
    | `forks_apart` | two copies of a state that train in turns give the same results as one \
copy by itself |
    | `any_schedule` | the results do not depend on the order of the ranks' turns |
    | `replicas_agree` | all ranks have the same parameters, optimizer state and slots |
    | `resumes` | if the run is saved and loaded after any update, it continues bitwise equal |

    Args:
        step: the step.
        states: a function of a world that returns the states before the first update.
        batches: a function of a world that returns the rank's batches, at least `updates` of
            them. Default: `af.batches` of the first state.
        sizes: the sizes of the worlds.
        updates: the number of updates, at least 2.

    Raises:
        LawError: the step breaks a law.
        ArgumentError: there are too few batches, or the first state has no data for batches, or
            `states` is not a function that returns states.
    """
    if not callable(step):
        msg = f"check_step({step!r}): expected a function (states, batch) -> (states, metrics)."
        raise ArgumentError(msg)
    _check_takes_world("check_step(states=...)", states, "new states")
    arguments.check_integer("check_step", "updates", updates, 2, "a number of updates")
    arguments.check_sizes("check_step", sizes)

    def begin(world: World, _: None) -> States:
        new = states(world)
        flat = tree.tree_leaves(new)
        if not flat or not all(isinstance(state, TrainState) for state in flat):
            msg = (
                f"check_step: states(world) returned {_kinds(new)}. Expected a TrainState, or a"
                " tuple, dict or list of TrainStates."
            )
            raise ArgumentError(msg)
        return new

    def advance(old: States, offset: int, number: int) -> Iterator[tuple[States, Any]]:
        first, count = tree.tree_leaves(old)[0], 0
        source = batches_of(first) if batches is None else batches(first.world)
        start = 0 if batches is None else offset
        for batch in islice(source, start, start + number):
            old, metrics = step(old, batch)
            count += 1
            yield old, metrics
        if count < number:
            msg = f"check_step: there are only {count} batches for {number} updates."
            raise ArgumentError(msg)

    laws = {"returns_states": _returns_states, **COMMON}
    with warnings.catch_warnings():
        if batches is not None:  # accelfn would warn that the states' data are not used
            warnings.simplefilter("ignore", AccelfnWarning)
        _check("the step", laws, sizes, updates=updates, begin=begin, advance=advance)


def check_resume(
    make: Callable[[World], tuple[TrainState, Step]],
    steps: int,
    *,
    sizes: Sequence[int] = (1, 2, 4),
) -> None:
    """Check that a run that is saved and loaded after any update continues bitwise equal.

    `check_resume` compares metrics and states after every later update. A difference in the
    batches shows in the states. Simulated reductions add in the order of a ring.

    Args:
        make: a function of a world that returns `(state, step)`: the state before the first
            update, with data, and the step.
        steps: the number of updates. The run is saved and loaded before the first update and
            after each update.
        sizes: the sizes of the worlds.

    Raises:
        LawError: a resumed run differs. The message names the update of the save, the update of
            the difference, and the difference.
        ArgumentError: `make` is not a function that returns a state and a step.

    Example:
        >>> import accelfn as af, torch
        >>> rows = torch.arange(24.0).view(8, 3)
        >>> def make(world):
        ...     state = af.TrainState.create(
        ...         model=lambda: torch.nn.Linear(3, 1),
        ...         optimizer=torch.optim.Adam,
        ...         data=af.Data(rows, global_batch_size=4),
        ...         setup=af.chain(af.shard_data(), af.wrap_ddp()),
        ...         world=world,
        ...     )
        ...     return state, af.make_step(lambda model, x: model(x).square().mean())
        >>> check_resume(make, 4)
    """
    _check_takes_world("check_resume(make)", make, "(state, step)")
    arguments.check_integer("check_resume", "steps", steps, 1, "a number of updates")
    arguments.check_sizes("check_resume", sizes)

    def advance(state: TrainState, _: int, number: int) -> Iterator[tuple[Any, Any]]:
        step = _state_and_step(make, state.world)[1]
        for batch in islice(batches_of(state), number):
            state, metrics = step(state, batch)
            yield state, metrics

    def begin(world: World, _: None) -> TrainState:
        return _state_and_step(make, world)[0]

    laws = {"resumes": COMMON["resumes"]}
    _check("the run", laws, sizes, updates=steps, begin=begin, advance=advance)


def _check(noun: str, laws: dict[str, Law], sizes: Sequence[int], **run: Any) -> None:
    """Check the laws of a run on each number of ranks; `run` has attributes of `Subject`."""
    subjects = [
        Subject(name=f"{size} rank{'s' if size > 1 else ''}", size=size, **run)
        for size in sizes
    ]
    for name, law in laws.items():
        broken = first_broken(law, subjects)
        if broken:
            msg = f"{noun} breaks the law {name!r}: {broken}"
            raise LawError(msg)


def _check_takes_world(call: str, function: Callable[..., Any], result: str) -> None:
    """Raise an error if the value is not a function of exactly a world."""
    if not callable(function):
        msg = (
            f"{call}: expected a function that takes a World and returns {result}, got"
            f" {type(function).__name__}. Each test run needs new states: create them in the"
            " function, with af.TrainState.create(..., world=world)."
        )
        raise ArgumentError(msg)
    error = arguments.call_mismatch(function, None)
    if error is not None:
        msg = (
            f"{call}: accelfn calls the function with the World of a rank, but it does not accept"
            f" that: {error}. Write a function of a world, such as lambda world: ..."
        )
        raise ArgumentError(msg) from error


def _state_and_step(
    make: Callable[[World], tuple[TrainState, Step]], world: World
) -> tuple[TrainState, Step]:
    """Return the state and the step that the user's function returns."""
    match cast("Any", make(world)):
        case (TrainState() as state, step) if callable(step):
            return state, cast("Step", step)
        case made:
            msg = (
                f"check_resume: make(world) returned {_kinds(made)}. Expected (state, step): the"
                " TrainState before the first update, and the step."
            )
            raise ArgumentError(msg)


def _kinds(value: Any) -> str:
    """Return the type of a value, or of each entry of a tuple or list."""
    if not isinstance(value, (tuple, list)):
        return type(value).__name__
    parts = cast("Sequence[Any]", value)
    return f"({', '.join(type(part).__name__ for part in parts)})"


def _returns_states(subject: Subject) -> str | None:
    """The step returns states of the same types, and no state that was passed to a step."""

    def rank(world: World) -> str | None:
        before = subject.start(world)
        kinds = [type(state).__name__ for state in tree.tree_leaves(before)]
        after = tree.tree_leaves(next(subject.advance(before, 0, 1))[0])
        new_kinds = [type(state).__name__ for state in after]
        if new_kinds != kinds:
            types = [", ".join(names) or "none" for names in (kinds, new_kinds)]
            return f"it got states of types {types[0]}, and returned {types[1]}."
        for place, state in enumerate(after):
            if state.lease.is_over:
                return (
                    f"it returned a state (at position {place}) that was already passed to a"
                    " step. Return the state that the inner step returned."
                )
        return None

    return subject.on_any_rank(rank)


# The law that training does not depend on the split of an update into shares or micro-batches.


_SPLITTING = ("data", "reduce", "engine", "layout")
_RESULT = ("loss", "grads", "hyper", "after_update", "eval_params", "finalize")
_DRAWING = {"loss", "value_and_grad", "module", "compiles"}
_COARSE = Comparison(rtol=5e-2, atol=1e-3)
"""For computation in 16 bits or less, because each order of a sum rounds differently."""


_ADVICE = {
    "wrap_fsdp": " Under wrap_fsdp, tensors are DTensors. Compute a norm as"
    ' tensor.norm().full_tensor(), or reject wrap_fsdp: refuses = {"layout": "..."}.',
    "micro-batches": " Multiply a penalty on an af.Loss by the weight of the loss:"
    " af.Loss(total + weight * penalty, weight). If the transform needs the whole batch,"
    ' reject micro-batches: refuses = {"micro_batches": "..."}.',
}
"""Advice for the error message, by how the update was split."""
_FAR = 0.4
"""The allowed relative difference of parameter changes if gradients are sent later."""


def splits_alike(subject: Subject) -> str | None:
    """Results do not depend on how an update is split.

    The reference is a run on one rank without micro-batches, and without transforms that only
    split updates.
    """
    if not subject.splits:
        return None
    members, full = subject.members, chain(*subject.members)
    lossy = "reduces_to_mean" in full.gives_up() or "apart" in full.facts
    draws = any(full.owners.get(key) or key in full.facts for key in _DRAWING)
    base = subject.build(*(m for m in members if lossy or not _only_splits(m)))
    with warnings.catch_warnings():
        # do not warn that all ranks use the same samples, which is intended here
        warnings.simplefilter("ignore", AccelfnWarning)
        reference = _histories(subject, base, 1)
        if isinstance(reference, str):
            return f"the run on one rank raised {reference}"
        for how, setup in _split_setups(subject, full, lossy=lossy).items():
            runs = _histories(subject, setup, subject.size)
            broken = _compare(subject, setup, reference[0], runs)
            if broken and draws:  # ranks and micro-batches draw different numbers
                again = _histories(subject, base, 1, name="another")
                if isinstance(again, str) or _differ(reference[0], again):
                    return None
            if broken:
                advice = "".join(_ADVICE[key] for key in _ADVICE if key in how)
                return f"a run on one rank, and the same run {how}, {broken}{advice}"
        if not lossy or subject.size == 1:
            return None
        return _counts_samples(subject, reference[0])


def _compare(
    subject: Subject, setup: chain, reference: History, histories: list[History] | str
) -> str | None:
    """Return how runs with a setup differ from the reference, or which error they raised."""
    if isinstance(histories, str):
        return f"differ: the second run raised {histories}"
    if "reduces_to_mean" in setup.gives_up():
        off = max(_distance(reference, history) for history in histories)
        text = f"differ in the change of parameters, by {off:.2g} times this change."
        return text if off > _FAR else None
    broken = _differ(reference, histories)
    if broken and _is_coarse(subject, setup):
        # the sums of a micro-batch decide whether scaled losses overflow
        scales = "loss_scale" in setup.facts
        broken = None if scales else _differ(reference, histories, _COARSE)
    return broken and f"differ {broken}."


def _counts_samples(subject: Subject, reference: History) -> str | None:
    """Return how ranks without samples change the results of the rank that has all samples.

    The run is also saved on all ranks, and resumed on one rank.
    """
    setup = subject.build(*subject.members, shares=None, outside=rank_0_takes_all())
    runs = _histories(subject, setup, subject.size)
    if isinstance(runs, str):
        return f"{_RANK_0} are not alike: the second raised {runs}"
    broken = _compare(subject, setup, reference, runs[:1])
    if broken:
        return f"{_RANK_0} {broken}{_WEIGHTS}"
    if _differ(reference, runs[:1]):
        return None  # rounding depends on the number of ranks
    within = attrs.evolve(subject, setup=setup)
    for at in within.cuts[1:-1]:
        # a skipped update has an entry in the history, and no step
        end = next(i for i, row in enumerate(reference, 1) if row["step"] == at)
        params = [_params(run[end - 1]) for run in runs]
        if "replicas_agree" in setup.gives_up() and not first_difference(*params[:2]):
            continue  # after an average, each rank still has its own optimizer state
        with tempfile.TemporaryDirectory() as folder:
            within.save_after(at, folder)
            rest = attrs.evolve(within, size=1).resume_from(at, folder)
        broken = _differ(reference[end:], rest)
        if broken:
            return (
                f"{_RANK_0} saved after {at} updates and resumed on one rank, differ"
                f" {broken}.{_MERGE}"
            )
    return None


def _params(contents: Mapping[str, Any]) -> dict[str, Any]:
    return {name: leaf for name, leaf in contents.items() if name.startswith("params[")}


@transform_of
class rank_0_takes_all:
    """A transform that gives all samples to rank 0, and no samples to the other ranks."""

    def value_and_grad(self, inner: Any, slot: Any, update: Update) -> tuple[Any, Any]:
        """Set the weights of all samples on the other ranks to 0."""

        def compute(state: Any, batch: Batch, *args: Any, **options: Any) -> Any:
            world, weights = update.world, batch.weights
            shares = [weights, *[[0] * len(weights)] * (world.size - 1)]
            weights = tuple(shares[world.rank])
            batch = attrs.evolve(batch, weights=weights, shares=lambda: shares)
            return inner(state, batch, *args, **options)

        return compute, slot


_RANK_0 = "a run on one rank, and the same run on ranks with all samples on rank 0,"
_WEIGHTS = " Weight each rank's part by its number of samples: add up update.weight in the slot."
_MERGE = (
    " In merge, return each rank's number of samples as its weight. If the slot has a sum that is"
    " not yet sent, divide it by world.size, so that the new ranks together have the same sum."
)


def _distance(reference: History, other: History) -> float:
    """Return how much two runs differ in their change of parameters, relative to the change."""

    def change_of(history: History) -> torch.Tensor:
        last, params = history[-1], _params(history[0])
        return torch.cat([(last[n] - params[n]).flatten().double() for n in params])

    change = change_of(reference)
    return float((change_of(other) - change).norm() / change.norm())


def _only_splits(transform: Any) -> bool:
    """Whether a transform only splits updates, and does not change their results."""
    owners = chain(transform).owners
    return any(map(owners.get, _SPLITTING)) and not any(map(owners.get, _RESULT))


def _split_setups(subject: Subject, full: chain, *, lossy: bool) -> Mapping[str, chain]:
    """Return the setups that split updates, by their names in error messages.

    If ranks may differ, or may send gradients later, all ranks take the same samples.
    """
    splits = {field for field in _SPLITTING if full.owners[field]}
    several = f"on {subject.size} ranks " if subject.size > 1 else ""
    options: dict[str, dict[str, Any]] = {}
    if several and lossy and "data" not in splits:
        options[f"{several}that all take the same samples"] = {"shares": None}
    if several and not lossy:
        options[f"{several}with their shares"] = {}
    if several and not lossy and not splits - {"data"}:
        options[f"{several}under wrap_fsdp"] = {"engine": wrap_fsdp()}
    if not lossy and "data" not in splits:
        outside = accumulate(num_micro_batches=2)
        options[f"{several}in two micro-batches"] = {"outside": outside}
    setups: dict[str, chain] = {}
    for how, parts in options.items():
        with suppress(CompositionError):  # the transform rejects this setup
            setups[how] = subject.build(*subject.members, **parts)
    return setups


def _histories(
    subject: Subject, setup: chain, size: int, *, name: str | None = None
) -> list[History] | str:
    """Return each rank's history in a setup, with the mean metrics; or the error of the run.

    With another `name`, the state draws other random numbers.
    """

    def begin(world: World, setup: chain) -> TrainState:
        state = subject.begin(world, setup)
        definition = attrs.evolve(state.definition, name=name or state.name)
        return attrs.evolve(state, definition=definition)

    def advance(
        state: TrainState, offset: int, number: int
    ) -> Iterator[tuple[TrainState, Any]]:
        for after, metrics in subject.advance(state, offset, number):
            yield after, metrics.all_reduce_mean(after.world)

    changes = {"size": size, "setup": setup, "begin": begin, "advance": advance}
    try:
        return attrs.evolve(subject, **changes).histories()
    except Exception as error:  # noqa: BLE001 - the plain run raised nothing
        return f"{type(error).__name__}: {error}"


_ADDED = "metrics", "slots"
"""The prefixes of history entries that a transform may add."""


def _differ(
    ref: History, runs: Sequence[History], margin: Comparison = NEARLY_EQUAL
) -> str | None:
    """Return the first difference of ranks' histories from a reference, except for rounding."""
    for rank, history in enumerate(runs):
        for update, (one, other) in enumerate(zip(ref, history, strict=True), 1):
            names = [n for n in other if not n.startswith(OWN)]
            differences = margin.by_name(
                {n: one[n] for n in names if n in one},
                # the reference lacks transforms that only split updates
                {n: other[n] for n in names if n in one or not n.startswith(_ADDED)},
            )
            for difference in differences.values():
                return f"{moment(update, ref)} on rank {rank}: {difference[0]}"
    return None


class _Dtypes(TorchDispatchMode):
    """A mode that records whether an operator returned numbers of 16 bits or less."""

    is_coarse = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call an operator, and record whether its result has 16 bits or less."""
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.dtype is not torch.bool:
            self.is_coarse = self.is_coarse or result.dtype.itemsize < 4
        return result


def _is_coarse(subject: Subject, setup: chain) -> bool:
    """Whether a setup computes with 16 bits or less in the first updates."""
    within = attrs.evolve(subject, setup=setup)

    def rank(world: World) -> bool:
        state = within.start(world)
        with _Dtypes() as dtypes:
            within.after(state, 2)
        return dtypes.is_coarse

    return any(simulate(subject.size, rank))
