# SPDX-License-Identifier: Apache-2.0
"""Laws that all training keeps; each says how a subject breaks it, or None."""

import os
import pickle
import random
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

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
    load,
    make_step,
    observe,
    save,
)
from accelfn.definition.transform import by_rank
from accelfn.plug import devices, tree
from accelfn.testing.comparing import entries, first_difference
from accelfn.testing.processes import Pool
from accelfn.testing.rank import pack
from accelfn.testing.simulate import simulate

# What laws are held against: training that can be begun, advanced, copied and saved.


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
                history.append(state_contents(states, metrics))
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
                history.append(state_contents(states, metrics))
            copies = [tree.tree_map(fork, states) for fork in (TrainState.copy, _twin)]
            run, twin = (self.advance(copy, 1, self.updates - 1) for copy in copies)
            for after, metrics in run:
                next(twin, None)
                history.append(state_contents(after, metrics))
            return history

        return list(self._simulated(rank))

    @property
    def _simulated(self) -> Callable[..., Sequence[Any]]:
        return partial(simulate, self.size, sums="ring")

    def _whole(self, states: States, done: int, number: int) -> History:
        history: History = []
        for after, metrics in self.advance(states, done, number):
            states = after
            history.append(state_contents(states, metrics))
        return [*history, {**state_contents(states, {}), **self.end(states)}]


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


def state_contents(states: States, metrics: Any) -> dict[str, Any]:
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


Law: TypeAlias = Callable[[Subject], str | None]
"""Returns how a subject breaks it, or None."""
Histories: TypeAlias = Sequence[Sequence[Mapping[str, Any]]]

REMEMBER = "Keep what is remembered in the state, not in an attribute or a closure."
_DRAW = (
    "Draw inside the loss, or from af.rng(state). Transforms that draw do not tell"
    " draws_nothing."
)


def memory_in_state(subject: Subject) -> str | None:
    """The same states give the same run, as often as it is run."""
    broken = differ(
        *(subject.plain, subject.histories()), "two runs from the same beginning"
    )
    return f"{broken} {REMEMBER}" if broken else None


def trains(subject: Subject) -> str | None:
    """Parameters are not the same after the last update as after the first."""
    first, *_, last = subject.plain[0][:-1]
    if subject.updates == 1 or any(
        first_difference({name: each}, {name: last[name]})
        for name, each in first.items()
        if "params[" in name
    ):
        return None
    return (
        f"no parameter changed in updates 2 to {subject.updates}: nothing is trained."
    )


def keeps_frozen(subject: Subject) -> str | None:
    """Parameters that are not trained stay as they are."""

    def rank(world: World) -> str | None:
        state = subject.start(world)
        names = state.params.keys() - set(state.trainable)
        frozen = {name: state.params[name].clone() for name in names}
        for after, _ in subject.advance(state, 0, subject.updates):
            state = after
        return first_difference(frozen, {name: state.params[name] for name in names})

    broken = next(filter(None, simulate(subject.size, rank)), None)
    advice = "Change those of state.trainable alone."
    return f"it changes a frozen parameter, {broken} {advice}" if broken else None


def forks_apart(subject: Subject) -> str | None:
    """A copy trains as its original does, while a twin of it trains, in turns, elsewhere."""
    plain = [history[:-1] for history in subject.plain]
    broken = differ(
        plain,
        subject.fork(),
        "a run and a copy of it, beside whose updates others ran,",
    )
    return f"{broken} {REMEMBER}" if broken else None


def leaves_settings(subject: Subject) -> str | None:
    """The process's settings, such as torch's default dtype, stay as they are."""

    def rank(world: World) -> str | None:
        for _ in subject.advance(subject.start(world), 0, 2):
            pass
        for name, (get, _, tried) in _SETTINGS.items():
            if get() != tried:
                return f"it sets {name} to {get()}, for all that runs in the process."
        return None

    with _settings_as_tried():  # once for all ranks, which share them
        return next(filter(None, simulate(subject.size, rank)), None)


@contextmanager
def _settings_as_tried() -> Generator[None]:
    before = {name: get() for name, (get, _, _) in _SETTINGS.items()}
    try:
        for _, put, tried in _SETTINGS.values():
            put(tried)
        yield
    finally:
        for name, (_, put, _) in _SETTINGS.items():
            put(before[name])


def no_environment(subject: Subject) -> str | None:
    """Environment variables, `RANK` say, change nothing."""
    plain = subject.plain
    for values in _ENVIRONMENTS:
        shown = " ".join(f"{name}={value}" for name, value in values.items())
        with _environment(values):
            broken = _attempt(
                *(plain, subject.histories),
                f"with {shown or 'no RANK'} in the environment",
            )
        if broken:
            return f"{broken} Take the rank from the world."
    return None


def own_randomness(subject: Subject) -> str | None:
    """The process's random generators are neither read nor moved."""
    broken = _attempt(
        *(subject.plain, partial(subject.histories, seed=1)),
        "with the process's random generators seeded differently",
    )
    if broken:
        return f"{broken} {_DRAW}"

    def rank(world: World) -> list[str]:
        states = subject.start(world)
        before = _generators()
        for _ in subject.advance(states, 0, 2):
            pass
        after = _generators()
        return [name for name in before if before[name] != after[name]]

    moved = [name for found in simulate(subject.size, rank) for name in found]
    return f"it moves {moved[0]}'s random generator. {_DRAW}" if moved else None


def any_schedule(subject: Subject) -> str | None:
    """In whichever order ranks have their turns, the run is the same."""
    plain = subject.plain
    for schedule in ([1] * 200, [1, 0, 2] * 80):
        other = partial(subject.histories, schedule=schedule)
        broken = _attempt(plain, other, "with the ranks' turns in another order")
        if broken:
            return broken
    return None


def replicas_agree(subject: Subject) -> str | None:
    """Ranks hold the same parameters, optimizer state and slots, bit by bit.

    Entries of slots that a transform tells by_rank may be each rank's own, as values of
    metrics are, but not their names.
    """
    shared = [
        [_replicated_entries(each) for each in history] for history in subject.plain
    ]
    said = "the states that rank 0 and another rank hold"
    broken = differ(shared[:1] * subject.size, shared, said)
    return broken and broken + (_BY_RANK if ": slots[" in broken else "")


_BY_RANK = (
    " What a slot holds for this rank alone is told by its name:"
    ' tells = {"by_rank": ("rest",)}.'
)


def resumes(subject: Subject) -> str | None:
    """Saved and loaded after any update, the run goes on bit by bit."""
    plain = subject.plain
    for at in subject.cuts:
        with tempfile.TemporaryDirectory() as folder:
            cut = partial(subject.cut, at, Path(folder))
            broken = _attempt(plain, cut, f"saved and loaded after {at} updates")
        if broken:
            return f"{broken} {REMEMBER}"
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
"""By name, the laws of transforms and of steps."""


def first_broken(law: Law, subjects: Sequence[Subject]) -> str | None:
    """Return how the first of some subjects breaks a law, and which it was."""
    for subject in subjects:
        tried = f"It was tried with {subject.name}."
        try:
            broken = law(subject)
        except Exception as error:
            error.add_note(tried)
            raise
        if broken:
            return f"{broken}\n{tried}"
    return None


def differ(one: Histories, two: Histories, what: str) -> str | None:
    """Return the first difference of two runs, rank by rank, or None."""
    for rank, (mine, its) in enumerate(zip(one, two, strict=True)):
        for update, (here, there) in enumerate(zip(mine, its, strict=True), start=1):
            broken = first_difference(here, there)
            if broken:
                where = (
                    "at the end" if update == len(mine) else f"after update {update}"
                )
                return f"{what} differ {where} on rank {rank}: {broken}"
    return None


_SETTINGS: Mapping[str, tuple[Callable[[], Any], Callable[[Any], Any], Any]] = {
    "torch's default dtype": (
        *(torch.get_default_dtype, torch.set_default_dtype),
        torch.float32,
    ),
    "torch's number of threads": (torch.get_num_threads, torch.set_num_threads, 1),
    "torch's deterministic algorithms": (
        *(
            torch.are_deterministic_algorithms_enabled,
            torch.use_deterministic_algorithms,
        ),
        False,
    ),
    "torch's precision of products": (
        *(devices.precisions, devices.set_precisions),
        ("ieee", "ieee"),
    ),
    "whether gradients are taken": (
        *(torch.is_grad_enabled, torch.set_grad_enabled),
        True,
    ),
}
"""How settings are read and written, and what they are while a law looks."""
_ENVIRONMENTS: tuple[dict[str, str], ...] = (
    {},
    {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"},
    {"RANK": "3", "LOCAL_RANK": "3", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8"},
)
_PLACES = (*_ENVIRONMENTS[1], "GROUP_RANK", "NODE_RANK", "SLURM_PROCID")


@contextmanager
def _environment(values: Mapping[str, str]) -> Generator[None]:
    """Set what launchers tell ranks, or take it away."""
    kept = {name: os.environ.pop(name) for name in _PLACES if name in os.environ}
    os.environ.update(values)
    try:
        yield
    finally:
        for name in values:
            os.environ.pop(name, None)
        os.environ.update(kept)


def _generators() -> dict[str, Any]:
    found: dict[str, Any] = {
        "torch": torch.default_generator.get_state().tolist(),
        "Python": random.getstate(),
    }
    if "numpy" in sys.modules:
        found["numpy"] = repr(sys.modules["numpy"].random.get_state(legacy=False))
    return found


def _replicated_entries(held: Mapping[str, Any]) -> dict[str, Any]:
    """Return what all ranks hold alike: not metrics, batch statistics, slots to be merged.

    Of metrics it is the names.
    """
    own = ("metrics", "buffers", "own ")
    return {name: "reported" for name in held if name.startswith("metrics")} | {
        name: leaf
        for name, leaf in held.items()
        if not name.rpartition(".")[2].startswith(own) and not name.startswith(own)
    }


def _attempt(
    plain: Sequence[History], again: Callable[[], Sequence[History]], how: str
) -> str | None:
    """Return how another run differs from the plain one, if only by an error."""
    try:
        other = again()
    except Exception as error:  # noqa: BLE001 - whatever it is, the plain run had none
        return f"{how} the run raised {type(error).__name__}: {error}"
    return differ(plain, other, f"a run and the same run {how}")


# Small training problems that checks bring themselves.


_IN, _OUT, _ROWS = 3, 2, 17


class _Centred(nn.Module):
    """Takes a running mean off its input: batch statistics that one row is enough for."""

    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(_IN))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.mean.lerp_(x.mean(0).to(self.mean), 0.25)
        return x - self.mean


class _Net(nn.Module):
    """Two layers with what transforms stumble over: a tied weight, a frozen one, a buffer."""

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
    """Return an optimizer of two parameter groups with unlike learning rates."""
    *first, last = named
    return make([{"params": first}, {"params": [last], "lr": 0.02}])


def _warmup(update: int) -> float:
    return min(1.0, (update + 1) / 4)


@attrs.frozen
class Problem:
    """A model, its data and its optimizer; seventeen samples, seven an update.

    Shares are uneven on two ranks, and on four one is empty at the end of an epoch.

    Attributes:
        optimizer: "momentum" or "adamw".
        weighted: whether the loss is a weighted total, an `af.Loss`.
        norm: whether the model has batch statistics.
        drop: whether it draws random numbers.
        grouped: whether a schedule sets the rates of two parameter groups.
        seed: of its parameters, and of the order of its samples.
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
            data=Data((inputs, targets), batch_size=7, shuffle=True),
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
        """Yield the state and metrics of each of the next updates."""
        step = make_step(self.loss)
        last = state.step + number
        if number:
            for batch in batches(state):
                state, metrics = step(state, batch)
                if state.setup.owners["observe"]:
                    state = observe(state, 1.0)  # it gets no better
                yield state, metrics
                if state.step >= last:
                    return


PROBLEMS = (
    Problem(),
    Problem("adamw", weighted=True, grouped=True),
    Problem("adamw", norm=True, drop=True),
)


# A call in a process in which nothing ran before.


_SECONDS = 600.0


def freeze(function: Callable[..., Any]) -> bytes:
    """Return a function as it is now, for a new process.

    The process imports functions and classes of modules that it finds. Others travel with
    what they refer to.
    """
    return cloudpickle.dumps(function)


def call_anew(frozen: bytes, *given: Any) -> Any:
    """Return what a frozen function returns in a new process.

    Raises:
        RankError: it raised, or cannot be imported there.
    """
    pool = Pool(1)
    try:
        (found,) = pool.run(pack((_call, (frozen, *given), {})), _SECONDS)
    finally:
        pool.close()
    return pickle.loads(found)  # noqa: S301 - of our own process


def _call(world: World, frozen: bytes, *given: Any) -> bytes:
    del world
    return cloudpickle.dumps(pickle.loads(frozen)(*given))  # noqa: S301 - the caller's own
