# SPDX-License-Identifier: Apache-2.0
"""`check_transform`: the laws that every transform keeps, held against one of them."""

import inspect
import math
import tempfile
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from types import CodeType
from typing import Any, TypeAlias

import attrs
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from accelfn import (
    Grads,
    TrainState,
    World,
    batches,
    chain,
    eval_params,
    finalize,
    make_step,
    shard_data,
    wrap_ddp,
)
from accelfn.definition.transform import facts_of, has_field, is_transform
from accelfn.errors import ArgumentError, LawError, NonFiniteGradsError
from accelfn.plug import arguments, collectives
from accelfn.testing.comparing import (
    copy_leaf,
    entries,
    first_difference,
    leaves,
)
from accelfn.testing.laws import (
    COMMON,
    PROBLEMS,
    REMEMBER,
    History,
    Law,
    Problem,
    Subject,
    call_anew,
    differ,
    first_broken,
    freeze,
    keeps_frozen,
    trains,
)
from accelfn.testing.method_laws import (
    intercept,
    method_laws,
    skips_once,
    with_methods,
)
from accelfn.testing.processes import RankError
from accelfn.testing.simulate import simulate
from accelfn.testing.step_laws import split_law

# pyright: reportPrivateUsage=false

# When each method of a transform first does something: before that, no law has seen it.


Acted: TypeAlias = dict[str, set[int]]
"""After which updates each method had done something, by how a message calls it."""

_ACTS = (
    *("grads", "hyper", "after_update"),
    *("reduce", "loss_scale", "observe", "eval_params"),
)
_WRAPS = ("data", "loss", "value_and_grad", "runner")
"""Methods that return another plan, or function, where they do something."""
_OVER_RANKS = ("data", "reduce", "runner")
"""Methods that may have nothing to do in a world of 1."""


def observe_acts(subject: Subject, start: Callable[[World, Any], Any]) -> Acted:
    """Return which methods did something in which of a subject's updates, on any rank.

    What counts is that it changed a bit of what it was given, or that ranks communicated.

    Args:
        subject: what is trained.
        start: gives the state before the first update, of a world, in a setup in which
            each transform is what a function makes of it.
    """
    found: Acted = {}
    update = [0] * subject.size

    def observed(transform: Any) -> Any:
        def note(name: str, rank: int) -> None:
            found.setdefault(name, set()).add(update[rank])

        get = _note_options(transform, _options(transform), found)
        seen = intercept(transform, (*_ACTS, "finalize"), _note_method(note))
        seen = intercept(seen, _WRAPS, _note_wrapper(note))
        return with_methods(seen, {"__getattribute__": get})

    def rank(world: World) -> None:
        # all that is called, not only the latest
        world.connection.activity.trail = deque()
        state = start(world, observed)
        update[world.rank] = 1
        for after, _ in subject.advance(state, 0, subject.updates):
            eval_params(after)
            finalize(after.copy())
            update[world.rank] += 1

    simulate(subject.size, rank)
    return found


def idle(transforms: Any, found: Mapping[str, set[int]], size: int) -> list[str]:
    """Return the methods that did nothing, of those that have something to do in time.

    `finalize` may owe nothing, and the models here may have nothing that `module` is about;
    `init`, `merge` and `engine` are no changes of something.
    """
    wanted = [
        method_name(each, field, skipped=field in _seeing_skips(each))
        for each in transforms
        for field in (*_ACTS, *_WRAPS)
        if has_field(each, field) and callable(getattr(each, field))
        if size > 1 or field not in _OVER_RANKS
    ]
    return [name for name in wanted if name not in found]


def unread_options(transforms: Any, found: Mapping[str, Any]) -> list[str]:
    """Return the options that have no effect: no method names them, and none was read."""
    options = [(each, option) for each in transforms for option in _options(each)]
    wanted = [f"{each!r}.{option}" for each, option in options]
    return [name for name in wanted if name not in found]


def _options(transform: Any) -> list[str]:
    """Return the options that no method names, which functions outside may read."""
    kind = type(transform)
    bodies = [each for cls in kind.__mro__ for each in vars(cls).values()]
    named = set[str]().union(*map(_names, bodies))
    options = [each.name for each in attrs.fields(kind) if each.eq and each.init]
    return [each for each in options if each != "name" and each not in named]


def _names(value: Any) -> set[str]:
    """Return the names and strings in a method or a property, and in functions inside it."""
    if isinstance(value, str):  # as in getattr(self, "scale")
        return {value}
    body = inspect.unwrap(getattr(value, "fget", getattr(value, "func", value)))
    code = getattr(getattr(body, "__func__", body), "__code__", body)
    if not isinstance(code, CodeType) or code.co_filename.startswith("<attrs"):
        return set()
    return set(code.co_names).union(*map(_names, code.co_consts))


def _note_options(transform: Any, options: list[str], found: Acted) -> Any:
    """Return the access to attributes, which notes each option that is read."""

    def get(self: Any, name: str) -> Any:
        if name in options:
            frame = inspect.currentframe()
            caller = frame and frame.f_back and frame.f_back.f_code.co_name
            if caller not in ("_repr", "__eq__", "__hash__"):  # not a use
                found[f"{transform!r}.{name}"] = {0}
        return object.__getattribute__(self, name)

    return get


def _seeing_skips(transform: Any) -> Sequence[str]:
    """Return the methods that must do something after a skipped update."""
    return ["after_update"] if "sees_skips" in facts_of(transform) else []


def method_name(transform: Any, field: str, *, skipped: bool) -> str:
    """Return what a message calls a transform's method."""
    return f"{transform!r}.{field}{' of a skipped update' if skipped else ''}"


def _note_method(note: Callable[[str, int], None]) -> Callable[..., Any]:
    """Return a call of a method that notes whether it did something, if it is from outside."""
    busy: set[int] = set()

    def call(field: str, method: Any, self: Any, value: Any, *given: Any) -> Any:
        slot, update = given
        world = update.world
        if world.rank in busy:  # one method of the transform's calls another
            return method(self, value, slot, update)
        busy.add(world.rank)
        # after a skip, without it, the slot of before the update would stay
        kept = update.state.slots.get(self.name) if update.skipped else slot
        # what ranks only count until they meet is not yet what the method is for
        counts = field == "after_update" and "apart" in facts_of(self)
        before = _copy_values(field, value, kept, counts=counts)
        talked = len(world.connection.activity.trail)
        returned = method(self, value, slot, update)
        busy.discard(world.rank)
        if field == "hyper" and not returned[0]:  # it laid nothing over
            returned = value, returned[1]
        changed = first_difference(
            before, _copy_values(field, *returned, counts=counts)
        )
        changed = changed or (field == "eval_params" and returned[0] is not value)
        if len(world.connection.activity.trail) > talked or changed:
            note(method_name(self, field, skipped=update.skipped), world.rank)
        return returned

    return call


def _note_wrapper(note: Callable[[str, int], None]) -> Callable[..., Any]:
    """Return a call of a method that notes whether it returned another thing."""

    def call(field: str, method: Any, self: Any, inner: Any, *given: Any) -> Any:
        returned = method(self, inner, *given)
        if returned is not inner and returned != inner:
            note(method_name(self, field, skipped=False), 0)
        return returned

    return call


def _copy_values(field: str, value: Any, slot: Any, *, counts: bool) -> dict[str, Any]:
    """Return what a method can change of what it is given, copied; without what it counts."""
    found = {path: copy_leaf(leaf) for path, leaf in leaves("slot", slot)}
    if isinstance(value, TrainState):
        found = entries(value) | found
        value = None
    elif isinstance(value, Grads):
        skip = value.taken.skip
        value = {
            "tensors": value.tensors,
            "divisor": value.taken.divisor,
            "metrics": value.metrics,
            "skip": None if skip is None else skip.flag,
        }
    elif field == "hyper":
        value = {str(where): each for where, each in value.items()}
    found |= {path: copy_leaf(leaf) for path, leaf in leaves(field, value)}
    return {n: e for n, e in found.items() if not (counts and n.startswith("slot"))}


# Whether what a transform tells of itself is so.


# torch has no public name for whether a backward pass runs

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
        with_methods(each, {"tells": {**facts_of(each), "draws_nothing": False}})
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


_LEAST = 4  # of three an epoch: the last begins the next one
_TRIED = (5, 9, 17, 33)
_NUM_CUTS = 10
_LAST = (
    *("loads_anywhere", "keeps_frozen", "merges_all"),
    *("splits_alike", "sends_all_later"),
)
"""Laws that come last, for others explain better what breaks them."""
_SHARES, _ENGINE = shard_data(), wrap_ddp()


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
    | `inputs_unchanged` | a method changes in place its own slot and gradients, no more; \
`observe` not even its slot |
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
    arguments.check_sizes("check_transform", sizes)
    if updates is not None:
        arguments.check_integer(
            "check_transform", "updates", updates, 1, "a number of updates"
        )
    other = attrs.evolve(problems[0], seed=problems[0].seed + 1)
    anew = freeze(partial(_resume_runs, members, other, max(sizes)))
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


def _resume_runs(
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
                seen = observe_acts(subject, start)
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
        for said, names in ((_IDLE, idlers), (_UNREAD, unread_options(members, found)))
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
        end=_final_values,
    )


def _final_values(state: Any) -> dict[str, Any]:
    """Return what is evaluated, and what is left when what is owed is paid."""
    found = {f"eval_params[{name!r}]": p for name, p in eval_params(state).items()}
    found = {n: p.clone() for n, p in _gather(found, state).items()}
    params = finalize(state).params.items()
    left = {f"finalize.params[{name!r}]": param for name, param in params}
    return found | _gather(left, state)


def _gather(params: Mapping[str, Any], state: TrainState) -> dict[str, Any]:
    return collectives.gather_full(params, state.world, label="compare states")


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
