# SPDX-License-Identifier: Apache-2.0
"""`check_transform`: the laws that every transform keeps, held against one of them."""

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from accelfn.errors import ArgumentError, LawError
from accelfn.fields import has_field
from accelfn.testing.checking.laws import COMMON, Law, first_broken
from accelfn.testing.checking.problems import PROBLEMS, Problem
from accelfn.testing.checking.subject import Subject
from accelfn.testing.checking.watching import watched
from accelfn.testing.simulation.simulate import simulate
from accelfn.transform import chain, is_transform
from accelfn.transforms.ddp import wrap_ddp
from accelfn.transforms.shard import shard_data
from accelfn.update import finalize
from accelfn.views import eval_params
from accelfn.world import World

_UPDATES = 4  # of three an epoch: the last begins the next one


def check_transform(
    transform: Any,
    *,
    sizes: Sequence[int] = (1, 2, 4),
    problems: Sequence[Problem] = PROBLEMS,
) -> None:
    """Hold a transform against the laws that every transform keeps.

    It is composed with `shard_data` and `wrap_ddp`, unless it takes their part, and trains
    small models in simulated worlds. A law that it names in its `gives_up` must be broken.

    | law | says |
    | --- | --- |
    | `value` | it is compared and hashed by its options |
    | `inputs_unchanged` | a method changes in place its own slot and gradients, no more |
    | `own_slot` | it adds its own slot and no other |
    | `memory_in_state` | the same state gives the same run, as often as it is run |
    | `no_environment` | environment variables, `RANK` say, change nothing |
    | `own_randomness` | the process's random generators are neither read nor moved |
    | `forks_apart` | runs from copies of one state, taken in turns, do not meet |
    | `any_schedule` | in whichever order ranks have their turns, the run is the same |
    | `replicas_agree` | ranks hold the same parameters, optimizer state and slots |
    | `resumes` | saved and loaded after any update, the run goes on bit by bit |

    Args:
        transform: made by `@af.transform`; or a chain.
        sizes: of the worlds.
        problems: what is trained.

    Raises:
        LawError: it breaks a law, or keeps one that it says it gives up.
        ArgumentError: it is no transform, or gives up a law that is none of these.

    Cost: some 150 runs of four updates; a few seconds.

    Example:
        >>> import accelfn as af
        >>> check_transform(af.clip_grad_norm(1.0), sizes=[2])
    """
    if not is_transform(transform):
        msg = f"check_transform({transform!r}): expected a transform; see af.transform."
        raise ArgumentError(msg)
    members = transform.transforms if isinstance(transform, chain) else (transform,)
    given_up = _given_up(members)
    laws = {**_own_laws(members), **COMMON}
    unknown = sorted(given_up.keys() - laws.keys())
    if unknown:
        msg = f"{transform!r} gives up {unknown}; the laws are {sorted(laws)}."
        raise ArgumentError(msg)
    subjects = [_subject(members, each, size) for each in problems for size in sizes]
    for name, law in laws.items():
        broken = first_broken(law, subjects)
        if broken and name not in given_up:
            msg = f"{transform!r} breaks the law {name!r}: {broken}"
            raise LawError(msg)
        if not broken and name in given_up and max(sizes) > 1:
            msg = (
                f"{transform!r} says that it gives up {name!r} ({given_up[name]}), but"
                f" keeps it in all {len(subjects)} cases. Take it out of gives_up."
            )
            raise LawError(msg)


def _given_up(members: Sequence[Any]) -> Mapping[str, str]:
    return chain(*members).gives_up()


def _setup(members: Sequence[Any]) -> chain:
    """Return a chain around transforms, of what they need and nothing that they replace."""
    around: list[Any] = []
    if not any(isinstance(each, shard_data) for each in members):
        around.append(shard_data())
    reduces = (has_field(each, field) for each in members for field in _REDUCING)
    if not any(reduces):
        around.append(wrap_ddp())
    return chain(*around, *members)


_REDUCING = ("engine", "reduce")


def _subject(members: Sequence[Any], problem: Problem, size: int) -> Subject:
    return Subject(
        name=f"{problem!r} on {size} rank{'s' if size > 1 else ''}",
        size=size,
        updates=_UPDATES,
        start=lambda world: problem.state(world, _setup(members)),
        advance=lambda state, _, number: problem.updates(state, number),
        end=_owed,
    )


def _owed(state: Any) -> dict[str, Any]:
    """Return what is evaluated, and what is left when what is owed is paid."""
    found = {f"eval_params[{n!r}]": p.clone() for n, p in eval_params(state).items()}
    params = finalize(state).params.items()
    return found | {f"finalize.params[{name!r}]": param for name, param in params}


def _own_laws(members: Sequence[Any]) -> dict[str, Law]:
    """Return the laws that look at the transforms themselves."""

    def value(subject: Subject) -> str | None:
        del subject
        return next(filter(None, map(_not_a_value, members)), None)

    def inputs_unchanged(subject: Subject) -> str | None:
        seen: list[str] = []
        tried = _setup([watched(each, seen.append) for each in members])

        def start(world: World) -> Any:
            return subject.start(world).with_setup(tried)

        attrs.evolve(subject, start=start).histories()
        return f"{seen[0]}. Return new tensors instead." if seen else None

    def own_slot(subject: Subject) -> str | None:
        names = {each.name for each in _setup(members).transforms}

        def rank(world: World) -> list[str]:
            states = subject.start(world)
            for after, _ in subject.advance(states, 0, 1):
                states = after
            return sorted(set(states.slots) - names)

        others = simulate(subject.size, rank)[0]
        return f"it made the slots {others}, not its own." if others else None

    return {"value": value, "inputs_unchanged": inputs_unchanged, "own_slot": own_slot}


def _not_a_value(transform: Any) -> str | None:
    same = attrs.evolve(transform)
    if same != transform:
        return "a copy with the same options is not equal to it."
    try:
        alike = hash(same) == hash(transform)
    except TypeError as error:
        return f"it has no hash ({error}). Make its options values, tuples say."
    return None if alike else "equal values of it have different hashes."
