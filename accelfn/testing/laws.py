# SPDX-License-Identifier: Apache-2.0
"""Laws of all training. A law is a function that returns how a subject breaks it, or None."""

import os
import pickle
import tempfile
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import attrs
import cloudpickle
import torch
from torch import nn

from accelfn import (
    Data,
    Loss,
    Metrics,
    TrainState,
    World,
    batches,
    chain,
    load,
    make_step,
    report_metric,
    save,
)
from accelfn.plug import devices, draws, tree
from accelfn.plug import transform as contract
from accelfn.testing.comparing import Comparison, entries, first_difference
from accelfn.testing.processes import Pool
from accelfn.testing.rank import pack
from accelfn.testing.simulate import simulate

T = TypeVar("T")
History: TypeAlias = list[Mapping[str, Any]]
"""The values of the states and metrics after each update, and at the end."""
States: TypeAlias = Any
"""A TrainState, or a tree of them."""
Advance: TypeAlias = Callable[[States, int, int], Iterator[tuple[States, Any]]]


@attrs.frozen(kw_only=True)
class Subject:
    """A training run on simulated ranks that laws test. Reductions add in the order of a ring.

    Attributes:
        name: the name of the run in error messages.
        size: the number of ranks.
        updates: the number of updates.
        start: a function of a world that returns the states before the first update.
        advance: a function `(states, offset, number)` that yields the states and metrics of the
            next `number` updates.
        begin: a function of a world and a setup that returns the first states, or None if the
            setup is fixed.
        end: a function of the last states that returns more values to compare, by name.
        splits: whether the result does not depend on how an update is split, because the run
            has no random numbers and no batch statistics.
        num_cuts: the largest number of updates after which the run is saved and loaded; None
            for all updates.
    """

    name: str
    size: int
    updates: int
    start: Callable[[World], States]
    advance: Advance
    begin: Callable[[World, Any], States] | None = None
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
        count = max(1, most - 4)
        chosen = {between[len(between) * i // count] for i in range(count)}
        return [0, *sorted(chosen), *cuts[-3:]]

    @cached_property
    def plain(self) -> list[History]:
        """Each rank's history without interruption. The run happens at the first access."""
        return self.histories()

    def within(self, setup: Any) -> "Subject":
        """Return the same training run with another setup."""
        assert self.begin is not None  # noqa: S101 - tests of transforms set it
        begin = self.begin

        def start(world: World) -> States:
            return begin(world, setup)

        return attrs.evolve(self, start=start)

    def histories(self, **options: Any) -> list[History]:
        """Run without interruption, and return each rank's history."""

        def rank(world: World) -> History:
            return self._run(self.start(world), 0, self.updates)

        return self._on_ranks(rank, **options)

    def run_cut(self, at: int, folder: Path) -> list[History]:
        """Save and load the run after `at` updates, and return each rank's history."""
        heads = self.save_after(at, folder)
        tails = self.resume_from(at, folder)
        return [head + tail for head, tail in zip(heads, tails, strict=True)]

    def save_after(self, at: int, folder: Path) -> list[History]:
        """Run the first `at` updates, save the states, and return each rank's history."""

        def rank(world: World) -> History:
            states, history = self._train(self.start(world), 0, at)
            for name, state in leaves(states):
                save(state, folder / name)
            return history

        return self._on_ranks(rank)

    def resume_from(self, at: int, folder: Path) -> list[History]:
        """Load the states after `at` updates, run the other updates, and return the histories."""

        def rank(world: World) -> History:
            start = self.start(world)
            paths = (folder / name for name, _ in leaves(start))
            states = tree.tree_map(lambda new: load(new, next(paths)), start)
            return self._run(states, at, self.updates - at)

        return self._on_ranks(rank)

    def fork(self) -> list[History]:
        """Copy the states twice after update 1, and return each rank's history of one copy.

        The other copy, the twin, has other parameters, and trains in turns with the first copy.
        """

        def rank(world: World) -> History:
            states, history = self._train(self.start(world), 0, 1)
            copies = [tree.tree_map(fork, states) for fork in (TrainState.copy, _twin)]
            run, twin = (self.advance(copy, 1, self.updates - 1) for copy in copies)
            for after, metrics in run:
                next(twin, None)
                history.append(state_contents(after, metrics))
            return history

        return self._on_ranks(rank)

    def _on_ranks(self, rank: Callable[[World], T], **options: Any) -> list[T]:
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


OWN = "own "
"""The prefix of slot entries that a transform declares as `by_rank`."""


def _twin(state: TrainState) -> TrainState:
    """Return a copy of the state with other parameters."""
    params = {
        n: p * 1.25 if p.is_floating_point() else p for n, p in state.params.items()
    }
    return state.copy().with_params(params)


def leaves(states: States) -> list[tuple[str, TrainState]]:
    """Return the states of a tree in order, each with a numbered name."""
    flat: list[TrainState] = []
    tree.tree_map(flat.append, states)
    return [(f"state-{place}", state) for place, state in enumerate(flat)]


def state_contents(states: States, metrics: Any) -> dict[str, Any]:
    """Return copies of the saved values of states, and the metrics, by name."""
    contents: dict[str, Any] = {}
    several = len(leaves(states)) > 1
    for name, state in leaves(states):
        prefix = f"{name}." if several else ""
        own_paths = [
            f"slots[{slot!r}][{entry!r}]"
            for slot, entry in contract.by_rank(state.setup)
        ]
        for path, leaf in entries(state, gather=True).items():
            is_own = path.startswith(tuple(own_paths))
            contents[f"{prefix}{OWN if is_own else ''}{path}"] = leaf
    if isinstance(metrics, Mapping):
        contents |= {f"metrics[{name!r}]": value for name, value in metrics.items()}
    elif metrics is not None:
        tensors = enumerate(tree.tensor_leaves(metrics))
        contents |= {f"metrics ({i})": tensor for i, tensor in tensors}
    return contents


Law: TypeAlias = Callable[[Subject], str | None]
"""A function that returns how a subject breaks the law, or None."""
Around: TypeAlias = Callable[..., chain]
"""A function that completes transforms to a setup: it adds data sharding and an engine."""
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

    def rank(world: World) -> str | None:
        state = subject.start(world)
        names = state.params.keys() - set(state.trainable)
        frozen = {name: state.params[name].clone() for name in names}
        for after, _ in subject.advance(state, 0, subject.updates):
            state = after
        return first_difference(frozen, {name: state.params[name] for name in names})

    broken = next(filter(None, simulate(subject.size, rank)), None)
    advice = "Change only the parameters in state.trainable."
    return f"it changed a frozen parameter: {broken}. {advice}" if broken else None


def forks_apart(subject: Subject) -> str | None:
    """A copy of the states that trains in turns with another copy gives the same results."""
    plain = [history[:-1] for history in subject.plain]
    runs = "a run, and its copy that trained in turns with another copy,"
    return differ(plain, subject.fork(), runs, REMEMBER)


def leaves_settings(subject: Subject) -> str | None:
    """The run does not change settings of the process, such as torch's default dtype."""

    def rank(world: World) -> str | None:
        for _ in subject.advance(subject.start(world), 0, 2):
            pass
        for name, (get, _, value) in _SETTINGS.items():
            if get() != value:
                return f"it changed {name} to {get()} for the whole process."
        return None

    before = {name: get() for name, (get, _, _) in _SETTINGS.items()}
    try:  # set the settings once, because all ranks share them
        for _, write, value in _SETTINGS.values():
            write(value)
        return next(filter(None, simulate(subject.size, rank)), None)
    finally:
        for name, (_, write, _) in _SETTINGS.items():
            write(before[name])


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

    def rank(world: World) -> str | None:
        states = subject.start(world)
        before = draws.generator_states(torch.device("cpu"))
        for _ in subject.advance(states, 0, 2):
            pass
        after = draws.generator_states(torch.device("cpu"))
        names = "torch", "Python", "numpy"
        for name, old, new in zip(names, before, after, strict=True):
            if old != new:
                return f"it advanced {name}'s global generator. {_DRAW}"
        return None

    return next(filter(None, simulate(subject.size, rank)), None)


def any_schedule(subject: Subject) -> str | None:
    """The order of the ranks' turns does not change the results."""
    plain = subject.plain
    for schedule in ([1] * 200, [1, 0, 2] * 80):
        other = partial(subject.histories, schedule=schedule)
        broken = _attempt(plain, other, "with the ranks' turns in another order")
        if broken:
            return broken
    return None


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
    plain = subject.plain
    for at in subject.cuts:
        with tempfile.TemporaryDirectory() as folder:
            rerun = partial(subject.run_cut, at, Path(folder))
            how = f"saved and loaded after {at} updates"
            broken = _attempt(plain, rerun, how, REMEMBER)
        if broken:
            return broken
    return None


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


_SETTINGS: Mapping[str, tuple[Callable[[], Any], Callable[[Any], Any], Any]] = {
    "torch's default dtype": (
        *(torch.get_default_dtype, torch.set_default_dtype),
        torch.float32,
    ),
    "torch's number of threads": (torch.get_num_threads, torch.set_num_threads, 1),
    "torch's deterministic mode": (
        *(
            torch.are_deterministic_algorithms_enabled,
            torch.use_deterministic_algorithms,
        ),
        False,
    ),
    "torch's precision of matrix products": (
        *(devices.precisions, devices.set_precisions),
        ("ieee", "ieee"),
    ),
    "torch's grad mode": (
        *(torch.is_grad_enabled, torch.set_grad_enabled),
        True,
    ),
}
"""For each setting: a function that reads it, a function that sets it, and a test value."""
_ENVIRONMENTS: tuple[dict[str, str], ...] = (
    {},
    {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"},
    {"RANK": "3", "LOCAL_RANK": "3", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8"},
)
_PLACES = (*_ENVIRONMENTS[1], "GROUP_RANK", "NODE_RANK", "SLURM_PROCID")


@contextmanager
def _environment(values: Mapping[str, str]) -> Generator[None]:
    """In a `with` block: set these launcher variables, and remove all other launcher variables."""
    before = {name: os.environ.pop(name) for name in _PLACES if name in os.environ}
    os.environ.update(values)
    try:
        yield
    finally:
        for name in values:
            os.environ.pop(name, None)
        os.environ.update(before)


def _replicated_entries(contents: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that must be equal on all ranks.

    Values of metrics, buffers and entries declared as `by_rank` are left out. For metrics, only
    the names must be equal.
    """
    kinds = ("metrics", "buffers", "own ")
    return {name: "reported" for name in contents if name.startswith("metrics")} | {
        name: leaf
        for name, leaf in contents.items()
        if not name.rpartition(".")[2].startswith(kinds) and not name.startswith(kinds)
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

    def state(self, world: World, setup: Callable[[Any], Any] | None) -> TrainState:
        """Return the state before the first update."""
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(_ROWS, _IN, generator=generator)
        targets = torch.randn(_ROWS, _OUT, generator=generator)
        make = _OPTIMIZERS[self.optimizer]
        return TrainState.create(
            model=lambda: _Net(norm=self.norm, drop=self.drop),
            optimizer=partial(_in_groups, make) if self.grouped else make,
            schedule=_warmup if self.grouped else None,
            data=Data((inputs, targets), global_batch_size=7, shuffle=True),
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
        return Loss((errors * weights).sum(), weights.sum(), size=inputs.abs().sum())

    def updates(
        self, state: TrainState, number: int
    ) -> Iterator[tuple[TrainState, Metrics]]:
        """Train for `number` updates, and yield the state and metrics after each update."""
        step = make_step(self.loss)
        last = state.step + number
        if number:
            for batch in batches(state):
                state, metrics = step(state, batch)
                slots = state.slots.values()
                if any(isinstance(s, Mapping) and "reported" in s for s in slots):
                    state = report_metric(state, 1.0)  # a metric that never improves
                yield state, metrics
                if state.step >= last:
                    return


PROBLEMS = (
    Problem(),
    Problem("adamw", weighted=True, grouped=True),
    Problem("adamw", norm=True, drop=True),
)


# Calls of a function in a new process.


_SECONDS = 600.0


def call_anew(frozen: bytes, *args: Any) -> Any:
    """Call a function that `cloudpickle` pickled in a new process, and return the result.

    Raises:
        RankError: the function raised, or the process cannot import it.
    """
    pool = Pool(1)
    try:
        (result,) = pool.run(pack((_call, (frozen, *args), {})), _SECONDS)
    finally:
        pool.close()
    return pickle.loads(result)  # noqa: S301 - of our own process


def _call(world: World, frozen: bytes, *args: Any) -> bytes:
    del world
    return cloudpickle.dumps(pickle.loads(frozen)(*args))  # noqa: S301 - the caller's own
