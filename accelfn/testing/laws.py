# SPDX-License-Identifier: Apache-2.0
"""Laws of all training. A law is a function that returns how a subject breaks it, or None."""

import os
import pickle
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from functools import cached_property, partial
from itertools import count
from pathlib import Path
from typing import Any, TypeAlias, TypeVar
from unittest import mock

import attrs
import cloudpickle
import torch
from torch import nn

import accelfn as af
from accelfn.plug import devices, draws, tree
from accelfn.plug import transform as contract
from accelfn.testing.comparing import Comparison, entries, first_difference
from accelfn.testing.processes import Pool, RankError
from accelfn.testing.rank import pack
from accelfn.testing.simulate import simulate

T = TypeVar("T")
History: TypeAlias = list[Mapping[str, Any]]
"""The values of the states and metrics after each update, and at the end."""
States: TypeAlias = Any
"""A TrainState, or a tree of them."""
Advance: TypeAlias = Callable[[States, int, int], Iterator[tuple[States, Any]]]
Resume: TypeAlias = Callable[[int, str], list[History]]
"""A function of a number of updates and a folder that resumes the run that was saved there."""


@attrs.frozen(kw_only=True)
class Subject:
    """A training run on simulated ranks that laws test. Reductions add in the order of a ring.

    Attributes:
        name: the name of the run in error messages.
        size: the number of ranks.
        updates: the number of updates.
        begin: a function of a world and a setup that returns the states before the first update.
        advance: a function `(states, offset, number)` that yields the states and metrics of the
            next `number` updates.
        members: the transforms that the laws are about, if they are about transforms.
        build: a function that completes transforms to a setup: it adds data sharding and an
            engine. Its options replace these.
        setup: the setup of the run, or None if `begin` ignores it.
        end: a function of the last states that returns more values to compare, by name.
        splits: whether the result does not depend on how an update is split, because the run
            has no random numbers and no batch statistics.
        num_cuts: the largest number of updates after which the run is saved and loaded; None
            for all updates.
    """

    name: str
    size: int
    updates: int
    begin: Callable[[af.World, Any], States]
    advance: Advance
    members: Sequence[Any] = ()
    build: Callable[..., af.chain] = af.chain
    setup: Any = None
    end: Callable[[States], Mapping[str, Any]] = lambda _: {}
    splits: bool = False
    num_cuts: int | None = None

    @property
    def cuts(self) -> Sequence[int]:
        """The updates after which the run is saved and loaded: all, or `num_cuts` of them."""
        cuts, most = range(self.updates + 1), self.num_cuts
        if most is None or len(cuts) <= most:
            return cuts
        # update 0, the last three, and evenly spaced updates between them
        between = range(1, len(cuts) - 3)
        number = max(1, most - 4)
        chosen = {between[len(between) * i // number] for i in range(number)}
        return [0, *sorted(chosen), *cuts[-3:]]

    @cached_property
    def plain(self) -> list[History]:
        """Each rank's history without interruption. The run happens at the first access."""
        return self.histories()

    def start(self, world: af.World) -> States:
        """Return the states before the first update."""
        return self.begin(world, self.setup)

    def after(self, states: States, number: int) -> States:
        """Return the states after the first `number` updates."""
        for after, _ in self.advance(states, 0, number):
            states = after
        return states

    def watch_members(self, watch: Callable[[Any], Any]) -> "Subject":
        """Return the same run with `watch(transform)` instead of each transform."""
        return attrs.evolve(self, setup=self.build(*map(watch, self.members)))

    def on_any_rank(self, rank: Callable[[af.World], T | None]) -> T | None:
        """Run a function on each rank, and return the first result that is not empty."""
        return first(simulate(self.size, rank))

    def histories(self, **options: Any) -> list[History]:
        """Run without interruption, and return each rank's history."""

        def rank(world: af.World) -> History:
            return self._run(self.start(world), 0, self.updates)

        return self._on_ranks(rank, **options)

    def run_cut(self, at: int, resume: Resume | None = None) -> list[History]:
        """Save and load the run after `at` updates, and return each rank's history.

        By default, `resume_from` continues the run.
        """
        with tempfile.TemporaryDirectory() as folder:
            heads = self.save_after(at, folder)
            tails = (resume or self.resume_from)(at, folder)
        return [head + tail for head, tail in zip(heads, tails, strict=True)]

    def save_after(self, at: int, folder: str) -> list[History]:
        """Run the first `at` updates, save the states, and return each rank's history."""

        def rank(world: af.World) -> History:
            states, history = self._train(self.start(world), 0, at)
            for place, state in enumerate(tree.tree_leaves(states)):
                af.save(state, Path(folder, f"state-{place}"))
            return history

        return self._on_ranks(rank)

    def resume_from(self, at: int, folder: str) -> list[History]:
        """Load the states after `at` updates, run the other updates, and return the histories."""

        def rank(world: af.World) -> History:
            paths = (Path(folder, f"state-{place}") for place in count())
            start = self.start(world)
            states = tree.tree_map(lambda new: af.load(new, next(paths)), start)
            return self._run(states, at, self.updates - at)

        return self._on_ranks(rank)

    def fork(self) -> list[History]:
        """Copy the states twice after update 1, and return each rank's history of one copy.

        The other copy, the twin, has other parameters, and trains in turns with the first copy.
        """

        def rank(world: af.World) -> History:
            states, history = self._train(self.start(world), 0, 1)
            copies = [
                tree.tree_map(fork, states) for fork in (af.TrainState.copy, _twin)
            ]
            run, twin = (self.advance(copy, 1, self.updates - 1) for copy in copies)
            for after, metrics in run:
                next(twin, None)
                history.append(state_contents(after, metrics))
            return history

        return self._on_ranks(rank)

    def _on_ranks(self, rank: Callable[[af.World], T], **options: Any) -> list[T]:
        return list(simulate(self.size, rank, sums="ring", **options))

    def _run(self, states: States, offset: int, number: int) -> History:
        states, history = self._train(states, offset, number)
        return [*history, {**state_contents(states, {}), **self.end(states)}]

    def _train(
        self, states: States, offset: int, number: int
    ) -> tuple[States, History]:
        history: History = []
        for after, metrics in self.advance(states, offset, number):
            states = after
            history.append(state_contents(states, metrics))
        return states, history


def first(results: Iterable[T | None]) -> T | None:
    """Return the first result that is not empty, or None."""
    return next(filter(None, results), None)


OWN = "own "
"""The prefix of slot entries that a transform declares as `by_rank`."""


def _twin(state: af.TrainState) -> af.TrainState:
    """Return a copy of the state with other parameters."""
    params = {
        n: p * 1.25 if p.is_floating_point() else p for n, p in state.params.items()
    }
    return state.copy().with_params(params)


def state_contents(states: States, metrics: Any) -> dict[str, Any]:
    """Return copies of the saved values of states, and the metrics, by name."""
    contents: dict[str, Any] = {}
    flat = tree.tree_leaves(states)
    for place, state in enumerate(flat):
        prefix = f"state-{place}." if len(flat) > 1 else ""
        own_paths = tuple(
            f"slots[{slot!r}][{entry!r}]"
            for slot, entry in contract.by_rank(state.setup)
        )
        for path, leaf in entries(state, gather=True).items():
            is_own = path.startswith(own_paths)
            contents[f"{prefix}{OWN if is_own else ''}{path}"] = leaf
    if isinstance(metrics, Mapping):
        contents |= {f"metrics[{name!r}]": value for name, value in metrics.items()}
    elif metrics is not None:
        tensors = enumerate(tree.tensor_leaves(metrics))
        contents |= {f"metrics ({i})": tensor for i, tensor in tensors}
    return contents


Law: TypeAlias = Callable[[Subject], str | None]
"""A function that returns how a subject breaks the law, or None."""
NEARLY_EQUAL = Comparison(rtol=1e-4, atol=1e-6)
"""A comparison that allows rounding errors of sums and divisions."""
Histories: TypeAlias = Sequence[Sequence[Mapping[str, Any]]]

REMEMBER = (
    "Store values that later updates need in a slot of the state, not in an attribute or a"
    " closure. Draw random numbers from torch's default generator."
)
_DRAW = (
    "Draw random numbers inside the loss, or in a block `with af.fork_rng(state, purpose):`. A"
    " module that a transform adds must draw in its forward pass. A transform that draws must"
    " not declare the fact draws_nothing."
)


def memory_in_state(subject: Subject) -> str | None:
    """Two runs from the same states give the same results."""
    runs = "two runs from the same state"
    return differ(subject.plain, subject.histories(), runs, REMEMBER)


def trains(subject: Subject) -> str | None:
    """Parameters change between the first and the last update."""
    first, *_, last = subject.plain[0][:-1]
    if subject.updates == 1 or any(
        first_difference({name: param}, {name: last[name]})
        for name, param in first.items()
        if "params[" in name
    ):
        return None
    return f"no parameter changed in updates 2 to {subject.updates}, so nothing is trained."


def keeps_frozen(subject: Subject) -> str | None:
    """Frozen parameters do not change."""

    def rank(world: af.World) -> str | None:
        state = subject.start(world)
        names = state.params.keys() - set(state.trainable)
        frozen = {name: state.params[name].clone() for name in names}
        state = subject.after(state, subject.updates)
        return first_difference(frozen, {name: state.params[name] for name in names})

    broken = subject.on_any_rank(rank)
    advice = "Change only the parameters in state.trainable."
    return f"it changed a frozen parameter: {broken}. {advice}" if broken else None


def forks_apart(subject: Subject) -> str | None:
    """A copy of the states that trains in turns with another copy gives the same results."""
    plain = [history[:-1] for history in subject.plain]
    runs = "a run, and its copy that trained in turns with another copy,"
    return differ(plain, subject.fork(), runs, REMEMBER)


def leaves_settings(subject: Subject) -> str | None:
    """The run does not change settings of the process, such as torch's default dtype."""

    def rank(world: af.World) -> str | None:
        subject.after(subject.start(world), 2)
        for name, read, _, value in _SETTINGS:
            if read() != value:
                return f"it changed torch's {name} to {read()} for the whole process."
        return None

    before = [read() for _, read, _, _ in _SETTINGS]
    try:  # set the settings once, because all ranks share them
        for _, _, write, value in _SETTINGS:
            write(value)
        return subject.on_any_rank(rank)
    finally:
        for (_, _, write, _), value in zip(_SETTINGS, before, strict=True):
            write(value)


def no_environment(subject: Subject) -> str | None:
    """Environment variables, such as `RANK`, do not change the results."""
    plain = subject.plain
    for values in _ENVIRONMENTS:
        text = " ".join(f"{name}={value}" for name, value in values.items())
        with _environment(values):
            how = f"with {text or 'no RANK'} in the environment"
            advice = "Read the rank from the world, not from the environment."
            broken = _attempt(plain, subject.histories, how, advice)
        if broken:
            return broken
    return None


def own_randomness(subject: Subject) -> str | None:
    """The run neither reads nor advances the process's random generators."""
    how = "with the process's random generators seeded differently"
    broken = _attempt(subject.plain, partial(subject.histories, seed=1), how, _DRAW)
    if broken:
        return broken

    def rank(world: af.World) -> str | None:
        states = subject.start(world)
        before = draws.generator_states(torch.device("cpu"))
        subject.after(states, 2)
        after = draws.generator_states(torch.device("cpu"))
        names = "torch", "Python", "numpy"
        for name, old, new in zip(names, before, after, strict=True):
            if old != new:
                return f"it advanced {name}'s global generator. {_DRAW}"
        return None

    return subject.on_any_rank(rank)


def any_schedule(subject: Subject) -> str | None:
    """The order of the ranks' turns does not change the results."""
    how = "with the ranks' turns in another order"
    orders = [1] * 200, [1, 0, 2] * 80
    reruns = (partial(subject.histories, schedule=order) for order in orders)
    return first(_attempt(subject.plain, rerun, how) for rerun in reruns)


def replicas_agree(subject: Subject) -> str | None:
    """All ranks have bitwise equal parameters, optimizer state and slots.

    The values of metrics, and of slot entries that a transform declares as `by_rank`, may
    differ between ranks. Their names may not.
    """
    shared = [
        [_replicated_entries(entry) for entry in history] for history in subject.plain
    ]
    states = "the states of rank 0 and of another rank"
    broken = differ(shared[:1] * subject.size, shared, states)
    return broken and broken + (_BY_RANK if ": slots[" in broken else "")


_BY_RANK = (
    " If an entry of the slot, such as rest, may differ between ranks, declare it in the"
    ' transform: tells = {"by_rank": ("rest",)}.'
)


def resumes(subject: Subject) -> str | None:
    """A run that is saved and loaded after any update continues with bitwise equal results."""
    return first(
        _attempt(
            subject.plain,
            partial(subject.run_cut, at),
            f"saved and loaded after {at} updates",
            REMEMBER,
        )
        for at in subject.cuts
    )


COMMON: Mapping[str, Law] = {
    "memory_in_state": memory_in_state,
    "leaves_settings": leaves_settings,
    "no_environment": no_environment,
    "own_randomness": own_randomness,
    "forks_apart": forks_apart,
    "any_schedule": any_schedule,
    "replicas_agree": replicas_agree,
    "resumes": resumes,
}
"""The laws of transforms and of steps, by name."""


def first_broken(law: Law, subjects: Sequence[Subject]) -> str | None:
    """Return how the first subject that breaks the law breaks it, with its name; or None."""
    for subject in subjects:
        note = f"This happened with {subject.name}."
        try:
            broken = law(subject)
        except Exception as error:
            error.add_note(note)
            raise
        if broken:
            return f"{broken}\n{note}"
    return None


def differ(one: Histories, two: Histories, runs: str, advice: str = "") -> str | None:
    """Return a text on the first difference of two runs, or None if they are equal."""
    for rank, (history, other) in enumerate(zip(one, two, strict=True)):
        for update, pair in enumerate(zip(history, other, strict=True), start=1):
            broken = first_difference(*pair)
            if broken:
                where = moment(update, history)
                text = f"{runs} differ {where} on rank {rank}: {broken}. {advice}"
                return text.rstrip()
    return None


def moment(update: int, history: Sequence[object]) -> str:
    """Return a text for the moment of an entry of a history, counted from 1."""
    return "at the end" if update == len(history) else f"after update {update}"


_IEEE = ("ieee", "ieee")
_SETTINGS: Sequence[tuple[str, Callable[[], Any], Callable[[Any], Any], Any]] = (
    ("default dtype", torch.get_default_dtype, torch.set_default_dtype, torch.float32),
    ("number of threads", torch.get_num_threads, torch.set_num_threads, 1),
    (
        "deterministic mode",
        torch.are_deterministic_algorithms_enabled,
        torch.use_deterministic_algorithms,
        False,
    ),
    ("precision of matrix products", devices.precisions, devices.set_precisions, _IEEE),
    ("grad mode", torch.is_grad_enabled, torch.set_grad_enabled, True),
)
"""Settings of torch: the name, functions that read and set it, and a test value."""
_ENVIRONMENTS: tuple[dict[str, str], ...] = (
    {},
    {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"},
    {"RANK": "3", "LOCAL_RANK": "3", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8"},
)
_PLACES = (*_ENVIRONMENTS[1], "GROUP_RANK", "NODE_RANK", "SLURM_PROCID")


def _environment(values: Mapping[str, str]) -> AbstractContextManager[Any]:
    """In a `with` block: set these launcher variables, and remove all other launcher variables."""
    other_vars = {n: value for n, value in os.environ.items() if n not in _PLACES}
    return mock.patch.dict(os.environ, {**other_vars, **values}, clear=True)


def _replicated_entries(contents: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that must be equal on all ranks.

    Values of metrics, buffers and entries declared as `by_rank` are left out. For metrics, only
    the names must be equal.
    """
    left_out = re.compile(rf"(state-\d+\.)?({OWN}|buffers|metrics)")
    return {name: "reported" for name in contents if name.startswith("metrics")} | {
        name: leaf for name, leaf in contents.items() if not left_out.match(name)
    }


def _attempt(
    plain: Histories, again: Callable[[], Histories], how: str, advice: str = ""
) -> str | None:
    """Return how a second run differs from the first, or which error it raised; or None."""
    try:
        other = again()
    except Exception as error:  # noqa: BLE001 - the plain run raised nothing
        return (
            f"{how}, the run raised {type(error).__name__}: {error} {advice}".rstrip()
        )
    return differ(plain, other, f"a run, and the same run {how},", advice)


# Small training problems that the laws train.


_IN, _OUT, _ROWS = 3, 2, 17


class _Centred(nn.Module):
    """Subtracts a running mean: batch statistics that also work for a single row."""

    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(_IN))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.mean.lerp_(x.mean(0).to(self.mean), 0.25)
        return x - self.mean


class _Net(nn.Module):
    """A model with features that break wrong transforms: tied and frozen weights, a buffer."""

    def __init__(self, *, norm: bool, drop: bool) -> None:
        super().__init__()
        self.first = nn.Linear(_IN, _IN)
        self.tied = nn.Linear(_IN, _IN, bias=False)
        self.tied.weight = self.first.weight
        self.frozen = nn.Parameter(torch.ones(_IN), requires_grad=False)
        self.norm = _Centred() if norm else nn.Identity()
        self.drop = nn.Dropout(0.5) if drop else nn.Identity()
        self.head = nn.Linear(_IN, _OUT)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.tied(torch.tanh(self.first(x)) * self.frozen)
        return self.head(self.drop(self.norm(hidden)))


_OPTIMIZERS = {
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.5),
    "adamw": partial(torch.optim.AdamW, lr=0.05),
}


def _in_groups(make: Callable[[Any], Any], named: Any) -> torch.optim.Optimizer:
    """Return an optimizer of two parameter groups with different learning rates."""
    *first, last = named
    return make([{"params": first}, {"params": [last], "lr": 0.02}])


def _warmup(update: int) -> float:
    return min(1.0, (update + 1) / 4)


@attrs.frozen
class Problem:
    """A small training problem: a model, an optimizer and 17 samples, with 7 per update.

    On two ranks, the shares of a batch have different sizes. On four ranks, one share is empty
    at the end of an epoch.

    Attributes:
        optimizer: "momentum" (SGD with momentum) or "adamw".
        weighted: whether the loss is an `af.Loss` with sample weights.
        norm: whether the model has batch statistics.
        drop: whether the model has dropout.
        grouped: whether the optimizer has two parameter groups, and a schedule.
        seed: the seed of the parameters and of the order of samples.
    """

    optimizer: str = "momentum"
    weighted: bool = False
    norm: bool = False
    drop: bool = False
    grouped: bool = False
    seed: int = 1

    def state(
        self, world: af.World, setup: Callable[[Any], Any] | None
    ) -> af.TrainState:
        """Return the state before the first update."""
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(_ROWS, _IN, generator=generator)
        targets = torch.randn(_ROWS, _OUT, generator=generator)
        make = _OPTIMIZERS[self.optimizer]
        return af.TrainState.create(
            model=lambda: _Net(norm=self.norm, drop=self.drop),
            optimizer=partial(_in_groups, make) if self.grouped else make,
            schedule=_warmup if self.grouped else None,
            data=af.Data((inputs, targets), global_batch_size=7, shuffle=True),
            setup=setup,
            world=world,
            seed=self.seed,
        )

    def loss(self, model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> Any:
        """Return the loss of a batch."""
        inputs, targets = batch
        errors = (model(inputs) - targets).square().sum(1)
        if not self.weighted:
            return errors.mean()
        weights = inputs[:, 0].abs()
        return af.Loss((errors * weights).sum(), weights.sum(), size=inputs.abs().sum())

    def updates(
        self, state: af.TrainState, number: int
    ) -> Iterator[tuple[af.TrainState, af.Metrics]]:
        """Train for `number` updates, and yield the state and metrics after each update."""
        step = af.make_step(self.loss)
        source, last = iter(af.batches(state)), state.step + number
        while state.step < last:
            state, metrics = step(state, next(source))
            slots = state.slots.values()
            if any(isinstance(s, Mapping) and "reported" in s for s in slots):
                state = af.report_metric(state, 1.0)  # a metric that never improves
            yield state, metrics


PROBLEMS = (
    Problem(),
    Problem("adamw", weighted=True, grouped=True),
    Problem("adamw", norm=True, drop=True),
)


# The law that a run continues in a new process.


_SECONDS = 600.0


def new_process(make: bytes, subject: Subject) -> str | None:
    """A saved run continues in a new process with the same results.

    Only the first run of a problem in a process can show a difference. So `subject` has a
    problem that did not run before in this process.

    Args:
        make: a function of a number of updates that returns the subject, by `cloudpickle`.
        subject: the run.
    """

    def resume(at: int, folder: str) -> list[History]:
        with closing(Pool(1)) as pool:
            call = pack((_resume, (make, subject.updates, at, folder), {}))
            (histories,) = pool.run(call, _SECONDS)
        return pickle.loads(histories)  # noqa: S301 - of our own process

    try:
        histories = subject.run_cut(1, resume)
    except RankError as error:
        return f"the run failed after it was loaded in a new process: {error}"
    runs = "a run that continues in a new process, and the same run in this process,"
    return differ(histories, subject.plain, runs, REMEMBER)


def _resume(world: af.World, make: bytes, updates: int, at: int, folder: str) -> bytes:
    del world
    subject: Subject = pickle.loads(make)(updates)  # noqa: S301 - the caller's own
    return cloudpickle.dumps(subject.resume_from(at, folder))
