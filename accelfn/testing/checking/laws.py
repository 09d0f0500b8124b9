# SPDX-License-Identifier: Apache-2.0
"""Laws that all training keeps; each says how a subject breaks it, or None."""

import os
import random
import sys
import tempfile
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch

from accelfn.base import products
from accelfn.testing.checking.subject import History, Subject
from accelfn.testing.comparing.entries import first_difference
from accelfn.testing.simulate import simulate
from accelfn.world import World

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
    shared = [[_shared(each) for each in history] for history in subject.plain]
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
        *(products.precisions, products.set_precisions),
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


def _shared(held: Mapping[str, Any]) -> dict[str, Any]:
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
