# SPDX-License-Identifier: Apache-2.0
"""`check_transform`: the laws that every transform keeps, held against one of them."""

import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import attrs

from accelfn.base.arguments import check_integer, check_sizes
from accelfn.base.calling import called
from accelfn.collectives import wholes
from accelfn.definition.facts import facts_of
from accelfn.definition.fields import has_field
from accelfn.definition.transform import chain, is_transform
from accelfn.errors import ArgumentError, LawError
from accelfn.state.state import TrainState
from accelfn.state.views import eval_params
from accelfn.step.apply_grads import finalize
from accelfn.testing.checking.acting import Acted, acted, idle, unread
from accelfn.testing.checking.fact_laws import fact_law
from accelfn.testing.checking.fresh import call_anew, freeze
from accelfn.testing.checking.laws import (
    COMMON,
    REMEMBER,
    Law,
    differ,
    first_broken,
    keeps_frozen,
    trains,
)
from accelfn.testing.checking.method_laws import method_laws, skips_once
from accelfn.testing.checking.problems import PROBLEMS, Problem
from accelfn.testing.checking.split_laws import split_law
from accelfn.testing.checking.subject import History, Subject
from accelfn.testing.processes.run import RankError
from accelfn.transforms.ddp import wrap_ddp
from accelfn.transforms.shard import shard_data
from accelfn.world import World

_LEAST = 4  # of three an epoch: the last begins the next one
_TRIED = (5, 9, 17, 33)
_NUM_CUTS = 10
_LAST = (
    *("loads_anywhere", "keeps_frozen", "merges_all"),
    *("splits_alike", "sends_all_later"),
)
"""Laws that come last, for others explain better what breaks them."""
_SHARES, _ENGINE = shard_data(), wrap_ddp()


@called
def check_transform(
    transform: Any,
    *,
    sizes: Sequence[int] = (1, 2, 4),
    problems: Sequence[Problem] = PROBLEMS,
    updates: int | None = None,
) -> None:
    """Hold a transform against the laws that every transform keeps.

    It is composed with `shard_data` and `wrap_ddp`, unless it takes their part, and trains
    small models in simulated worlds. A law that it names in its `gives_up` must be broken.
    One that sees skips sees an update skipped.

    | law | says |
    | --- | --- |
    | `value` | it is compared and hashed by its options |
    | `inputs_unchanged` | a method changes in place its own slot and gradients, no more |
    | `own_slot` | it adds its own slot and no other, and keeps it and its dtypes |
    | `drops_nothing` | no gradient, no parameter, and no number of the state's is lost or moved |
    | `groups_apart` | `hyper` gives a parameter group nothing that depends on another's rate |
    | `takes_what_it_is_given` | `grads` and `eval_params` build on their first argument, or \
replace it: they do not take the update's own |
    | `skips_whole` | a skipped update leaves parameters, optimizer and slots as they were |
    | `trains` | parameters change |
    | `keeps_frozen` | parameters that are not trained stay as they are |
    | `merges_all` | what any rank has in an entry that it tells `by_rank` has a say in `merge` |
    | `passes_on` | what wraps a loss or `value_and_grad` passes on extras, `into=` and `sync=` |
    | `evaluates_purely` | `eval_params` and `hyper` between updates change nothing of the run |
    | `owes_once` | `finalize` again changes nothing, and ranks hold the same parameters then |
    | `loads_anywhere` | with a slot, it is saved on some ranks and loaded on more and on fewer |
    | `memory_in_state` | the same state gives the same run, as often as it is run |
    | `leaves_settings` | torch's settings, such as the default dtype, stay as they are |
    | `no_environment` | environment variables, `RANK` say, change nothing |
    | `own_randomness` | the process's random generators are neither read nor moved |
    | `forks_apart` | a copy trains as its original does, while another trains in turns |
    | `any_schedule` | in whichever order ranks have their turns, the run is the same |
    | `replicas_agree` | ranks hold the same parameters, optimizer state and slots, but for \
entries that it tells `by_rank` |
    | `reduces_to_mean` | what `reduce` gives is within 5 % the mean over all ranks, by weight |
    | `sends_all_later` | if `reduce` gives up `reduces_to_mean`, its results add up, over \
updates, to the mean's |
    | `resumes` | saved and loaded after any update, the run goes on bit by bit |
    | `splits_alike` | the result is that of one rank that takes each update whole, up to \
rounding: with ranks' shares, in micro-batches and under `wrap_fsdp` |
    | `new_process` | a run that is saved goes on alike in a new process |
    | `facts` | what it tells is so: it draws nothing, recomputes, judges what is finite |
    | `acts` | each method has done something by then, or nothing was seen of it |
    | `options_read` | methods, or functions that they call, read each option |

    Args:
        transform: made by `@af.transform`; or a chain.
        sizes: of the worlds.
        problems: what is trained.
        updates: how many are taken. Default: as many as it takes until each of `grads`,
            `hyper` and `after_update` has done something, and another update has followed,
            from 4 to 33; and if it can be, so that `finalize` has something to do.

    Raises:
        LawError: it breaks a law, or keeps one that it says it gives up.
        ArgumentError: it is no transform, or gives up a law that is none of these.

    Cost: some 250 runs of four updates, 9 s of one core. Beyond nine updates, it is saved and
    loaded after ten of them.

    Example:
        >>> import accelfn as af
        >>> check_transform(af.clip_grad_norm(1.0), sizes=[2])
    """
    if not is_transform(transform):
        msg = f"check_transform({transform!r}): expected a transform; see af.transform."
        raise ArgumentError(msg)
    members = transform.transforms if isinstance(transform, chain) else (transform,)
    given_up = chain(*members).gives_up()
    laws = {**_own_laws(members), **COMMON}
    for name in filter(laws.__contains__, _LAST):
        laws[name] = laws.pop(name)
    known = sorted({*laws, "acts", "options_read", "new_process"})
    unknown = sorted(given_up.keys() - set(known))
    if unknown:
        msg = f"{transform!r} gives up {unknown}; the laws are {known}."
        raise ArgumentError(msg)
    check_sizes("check_transform", sizes)
    if updates is not None:
        check_integer("check_transform", "updates", updates, 1, "a number of updates")
    other = attrs.evolve(problems[0], seed=problems[0].seed + 1)
    anew = freeze(partial(_resumed, members, other, max(sizes)))
    acting, number = _acting(members, problems, max(sizes), updates)
    laws |= acting
    subjects = [
        _subject(members, each, size, number) for each in problems for size in sizes
    ]
    here = _subject(members, other, max(sizes), number)
    laws["new_process"] = partial(_new_process, anew)
    for name, law in laws.items():
        broken = first_broken(law, [here] if name == "new_process" else subjects)
        if broken and name not in given_up:
            msg = f"{transform!r} breaks the law {name!r}: {broken}"
            raise LawError(msg)
        if not broken and name in given_up and max(sizes) > 1:
            msg = (
                f"{transform!r} says that it gives up {name!r} ({given_up[name]}), but"
                f" keeps it in all {len(subjects)} cases. Take it out of gives_up."
            )
            raise LawError(msg)


def _resumed(
    members: Sequence[Any], problem: Problem, size: int, updates: int, folder: Path
) -> list[History]:
    return _subject(members, problem, size, updates).resumed(1, folder)


def _new_process(anew: bytes, here: Subject) -> str | None:
    """A run goes on in a new process as it does in this one.

    The problem is another than all before it, and only the first run in a process can tell.
    """
    with tempfile.TemporaryDirectory() as name:
        heads = here.saved(1, Path(name))
        try:
            tails = call_anew(anew, here.updates, Path(name))
        except RankError as error:
            return f"loaded in a new process, the run raised {error}"
    resumed = [head + tail for head, tail in zip(heads, tails, strict=True)]
    said = "a run that goes on in a new process, and one that does so here,"
    broken = differ(resumed, here.plain, said)
    return f"{broken} {REMEMBER}" if broken else None


def _setup(
    members: Sequence[Any],
    *,
    outside: Any = None,
    shares: Any = _SHARES,
    engine: Any = _ENGINE,
) -> chain:
    """Return a chain around transforms, of what they need and nothing that they replace."""
    if any(isinstance(each, shard_data) for each in members):
        shares = None
    if any(has_field(each, field) for each in members for field in _REDUCING):
        engine = None
    skips = any("sees_skips" in facts_of(each) for each in members)
    return chain(outside, shares, engine, *members, skips_once() if skips else None)


_REDUCING = ("engine", "reduce")


def _acting(
    members: Sequence[Any],
    problems: Sequence[Problem],
    size: int,
    updates: int | None,
) -> tuple[dict[str, Law], int]:
    """Return the laws that each method and option does something, and when all have."""
    tried, found, idlers = 0, dict[str, set[int]](), list[str]()
    for tried in _TRIED if updates is None else (updates,):
        for problem in problems:
            subject = _subject(members, problem, min(size, 2), tried)

            def start(
                world: World, observed: Any, problem: Problem = problem
            ) -> TrainState:
                return problem.state(
                    world, _setup([observed(each) for each in members])
                )

            try:
                seen = acted(subject, start)
            except Exception as error:
                error.add_note(f"It was tried with {subject.name}.")
                raise
            for name, when in seen.items():
                found.setdefault(name, set()).update(when)
        idlers = idle(members, found, size)
        if not idlers:
            break
    told = "s" if tried > 1 else ""

    idle_said, unread_said = (
        next((said.format(name, tried, told) for name in names), None)
        for said, names in ((_IDLE, idlers), (_UNREAD, unread(members, found)))
    )
    laws: dict[str, Law] = {
        "acts": lambda _: idle_said,
        "options_read": lambda _: unread_said,
    }
    return laws, updates or _enough(found)


_IDLE = (
    "{} changed nothing, and ranks did not talk in it, in {} update{}, so that no law has seen"
    " it at work. Choose options with which it acts sooner, or more updates=; if it is there"
    ' only to look, say so: gives_up = {{"acts": "it only looks"}}.'
)
_UNREAD = "nothing reads {}, so that this option has no effect. Use it, or remove it."


def _enough(found: Acted) -> int:
    """Return after how many updates each method has acted, and one more; with work left."""
    ends = [name for name in found if name.endswith(".finalize")]
    others = [min(found[name]) for name in found if name not in ends]
    least = max([_LEAST, *(first + 1 for first in others)])
    owing = [at for name in ends for at in found[name] if at >= least]
    return min(owing, default=least)


def _subject(
    members: Sequence[Any], problem: Problem, size: int, updates: int
) -> Subject:
    return Subject(
        name=f"{problem!r} on {size} rank{'s' if size > 1 else ''}",
        size=size,
        updates=updates,
        num_cuts=_NUM_CUTS,
        splits=not (problem.norm or problem.drop),
        start=lambda world: problem.state(world, _setup(members)),
        begin=problem.state,
        advance=lambda state, _, number: problem.updates(state, number),
        end=_owed,
    )


def _owed(state: Any) -> dict[str, Any]:
    """Return what is evaluated, and what is left when what is owed is paid."""
    found = {f"eval_params[{name!r}]": p for name, p in eval_params(state).items()}
    found = {n: p.clone() for n, p in _gathered(found, state).items()}
    params = finalize(state).params.items()
    left = {f"finalize.params[{name!r}]": param for name, param in params}
    return found | _gathered(left, state)


def _gathered(params: Mapping[str, Any], state: TrainState) -> dict[str, Any]:
    return wholes(params, state.world, label="compare states")


def _own_laws(members: Sequence[Any]) -> dict[str, Law]:
    """Return the laws that look at the transforms themselves."""
    return {
        "value": lambda _: next(filter(None, map(_not_a_value, members)), None),
        "memory_in_state": COMMON["memory_in_state"],
        "own_randomness": COMMON["own_randomness"],
        "splits_alike": split_law(members, _setup),
        **method_laws(members, _setup),
        "trains": trains,
        "keeps_frozen": keeps_frozen,
        "facts": fact_law(members, _setup),
    }


def _not_a_value(transform: Any) -> str | None:
    same = attrs.evolve(transform)
    if same != transform:
        return "a copy with the same options is not equal to it."
    try:
        alike = hash(same) == hash(transform)
    except TypeError as error:
        return f"it has no hash ({error}). Make its options values, tuples say."
    return None if alike else "equal values of it have different hashes."
