# SPDX-License-Identifier: Apache-2.0
"""`check_transform`: check that a transform keeps the laws that all transforms must keep."""

import inspect
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import islice, product
from types import CodeType
from typing import Any, TypeAlias

import attrs
import cloudpickle
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

import accelfn as af
from accelfn.errors import ArgumentError, LawError, NonFiniteGradsError
from accelfn.plug import arguments, collectives
from accelfn.plug import transform as contract
from accelfn.testing.comparing import copy_leaf, entries, first_difference, leaves
from accelfn.testing.laws import (
    COMMON,
    PROBLEMS,
    Law,
    Problem,
    Subject,
    first,
    first_broken,
    keeps_frozen,
    new_process,
    trains,
)
from accelfn.testing.method_laws import (
    ACTS,
    METHOD_LAWS,
    intercept,
    loads_anywhere,
    merges_all,
    sends_all_later,
    skips_updates,
    with_methods,
)
from accelfn.testing.simulate import simulate
from accelfn.testing.step_laws import splits_alike

# pyright: reportPrivateUsage=false

# The first update when each method acts. Laws can test a method only after this update.


Acted: TypeAlias = dict[str, set[int]]
"""The numbers of the updates when a method acted, by the method's name in messages."""

_WRAPS = ("data", *contract.WRAPPERS)
"""Methods that act if they return another plan or function than their argument."""
_OVER_RANKS = ("data", "reduce")
"""Methods that need not act in a world of size 1."""


def observe_acts(acts: Acted, subject: Subject) -> None:
    """Run a subject, and add the methods that acted on any rank, with the updates, to `acts`.

    A method acts if its result differs from its argument in any bit, or if ranks communicate.
    """
    update = [0] * subject.size

    def note(name: str, rank: int) -> None:
        acts.setdefault(name, set()).add(update[rank])

    def watch(transform: Any) -> Any:
        get = _note_options(transform, _options(transform), acts)
        watcher = intercept(transform, (*ACTS, "finalize"), _note_method(note))
        watcher = intercept(watcher, _WRAPS, _note_wrapper(note))
        return with_methods(watcher, {"__getattribute__": get})

    watched_run = subject.watch_members(watch)

    def rank(world: af.World) -> None:
        # a record of all collectives; by default, the record keeps only the latest 20
        world.connection.activity.trail = deque()
        state = watched_run.start(world)
        update[world.rank] = 1
        for after, _ in watched_run.advance(state, 0, watched_run.updates):
            af.eval_params(after)
            af.finalize(after.copy())
            update[world.rank] += 1

    simulate(subject.size, rank)


def idle_methods(transforms: Any, acts: Mapping[str, set[int]], size: int) -> list[str]:
    """Return the methods that must act but did not.

    `finalize` and `module` need not act, because they may have nothing to do in these runs.
    `init`, `merge` and `engine` cannot act, because they do not change their arguments.
    """
    methods: list[str] = []
    for transform, field in product(transforms, (*ACTS, *_WRAPS)):
        # a method that sees skips must also act in a skipped update
        sees_skips = "sees_skips" in contract.facts_of(transform)
        in_skip = sees_skips and field == "after_update"
        is_due = size > 1 or field not in _OVER_RANKS
        has_method = is_due and contract.has_field(transform, field)
        if has_method and callable(getattr(transform, field)):
            methods.append(method_name(transform, field, in_skip=in_skip))
    return [name for name in methods if name not in acts]


def _options(transform: Any) -> list[str]:
    """Return the options that no method names. Other functions may still read them."""
    kind = type(transform)
    bodies = (var for cls in kind.__mro__ for var in vars(cls).values())
    # without texts and tuples: __match_args__ of attrs names all options
    methods = (body for body in bodies if not isinstance(body, (str, tuple)))
    named = set[str]().union(*map(_names, methods))
    options = [field.name for field in attrs.fields(kind) if field.eq and field.init]
    return [option for option in options if option != "name" and option not in named]


def _names(value: Any) -> set[str]:
    """Return all names and strings in the code of a method, property or inner function."""
    if isinstance(value, str):  # a string may name an option: getattr(self, "scale")
        return {value}
    if isinstance(value, tuple):
        return set().union(*map(_names, value))
    body = inspect.unwrap(getattr(value, "fget", getattr(value, "func", value)))
    code = getattr(getattr(body, "__func__", body), "__code__", body)
    if not isinstance(code, CodeType) or code.co_filename.startswith("<attrs"):
        return set()
    return set(code.co_names).union(*map(_names, code.co_consts))


def _note_options(transform: Any, options: list[str], acts: Acted) -> Any:
    """Return a `__getattribute__` that records each option that is read."""

    def get(self: Any, name: str) -> Any:
        if name in options:
            frame = inspect.currentframe()
            caller = frame and frame.f_back and frame.f_back.f_code.co_name
            if caller not in ("_repr", "__eq__", "__hash__"):  # not a use
                acts[f"{transform!r}.{name}"] = {0}
        return object.__getattribute__(self, name)

    return get


def method_name(transform: Any, field: str, *, in_skip: bool) -> str:
    """Return the name of a transform's method as it appears in error messages."""
    return f"{transform!r}.{field}{' of a skipped update' if in_skip else ''}"


def _note_method(note: Callable[[str, int], None]) -> Callable[..., Any]:
    """Return a function for `intercept` that calls a method and records whether it acted."""
    busy: set[int] = set()

    def call(field: str, method: Any, self: Any, value: Any, *rest: Any) -> Any:
        slot, update = rest
        world = update.world
        if world.rank in busy:  # a method of the transform calls another
            return method(self, value, slot, update)
        busy.add(world.rank)
        # in a skipped update, compare with the slot that would remain without this method
        old_slot = update.state.slots.get(self.name) if update.skipped else slot
        # ignore the slot if ranks train apart: it counts updates until the next exchange
        is_apart = "apart" in contract.facts_of(self)
        counts = field == "after_update" and is_apart and not update.skipped
        before = _copy_values(field, value, old_slot, counts=counts)
        num_calls = len(world.connection.activity.trail)
        result = method(self, value, slot, update)
        busy.discard(world.rank)
        if field == "hyper" and not result[0]:  # an empty dict overrides nothing
            result = value, result[1]
        change = first_difference(before, _copy_values(field, *result, counts=counts))
        change = change or (field == "eval_params" and result[0] is not value)
        has_communicated = len(world.connection.activity.trail) > num_calls
        if change or (has_communicated and field != "finalize"):
            note(method_name(self, field, in_skip=update.skipped), world.rank)
        return result

    return call


def _note_wrapper(note: Callable[[str, int], None]) -> Callable[..., Any]:
    """Return a function for `intercept` that records if a method returned another object."""

    def call(field: str, method: Any, self: Any, inner: Any, *rest: Any) -> Any:
        result = method(self, inner, *rest)
        outer = result if field == "data" else result[0]
        if outer is not inner and outer != inner:
            note(method_name(self, field, in_skip=False), 0)
        return result

    return call


def _copy_values(field: str, value: Any, slot: Any, *, counts: bool) -> dict[str, Any]:
    """Return copies of the values that a method can change; with `counts`, without the slot."""
    values = {path: copy_leaf(leaf) for path, leaf in leaves("slot", slot)}
    if isinstance(value, af.TrainState):
        values = entries(value) | values
        value = None
    elif isinstance(value, af.Grads):
        skip = value.taken.skip
        parts = value.tensors, value.taken.divisor, value.metrics
        value = (*parts, None if skip is None else skip.flag)
    elif field == "hyper":
        value = {str(where): v for where, v in value.items()}
    values |= {path: copy_leaf(leaf) for path, leaf in leaves(field, value)}
    return {n: e for n, e in values.items() if not (counts and n.startswith("slot"))}


# The law that the facts that a transform declares are true.


def true_facts(subject: Subject) -> str | None:
    """Declared facts are true, and recomputation is declared."""
    facts = subject.setup.facts
    return (
        _recomputes(subject)
        or ("by_rank" in facts and _no_entry(subject))
        or ("judges_finite" in facts and _not_judged(subject))
        or ("micro_batches" in facts and _other_parts(subject))
        or None
    )


def _no_entry(subject: Subject) -> str | None:
    """Check that every name in `by_rank` is an entry of the slot."""
    slots = simulate(1, lambda world: dict(subject.start(world).slots))[0]
    for member in subject.members:
        slot = slots.get(member.name)
        for name in contract.facts_of(member).get("by_rank", ()):
            if slot is not None and not (isinstance(slot, Mapping) and name in slot):
                return (
                    f"its fact by_rank names {name!r}, but its slot has no such entry."
                )
    return None


def _loss(model: nn.Module, batch: Any, factor: float) -> torch.Tensor:
    inputs, targets = batch
    return (model(inputs) - targets).square().sum(1).mean() * factor


def _not_judged(subject: Subject) -> str | None:
    """Check that after an infinite loss all parameters are finite, or the step raised."""

    def rank(world: af.World) -> bool:
        state, step = subject.start(world), af.make_step(_loss)
        for number, batch in enumerate(islice(af.batches(state), 3)):
            try:
                state, _ = step(state, batch, math.inf if number == 1 else 1.0)
            except NonFiniteGradsError:
                break
        return all(bool(param.isfinite().all()) for param in state.params.values())

    if all(simulate(subject.size, rank)):
        return None
    return (
        "it declares the fact judges_finite, but an infinite loss made parameters infinite or"
        " NaN. Skip updates with gradients that are not finite."
    )


def _recomputes(subject: Subject) -> str | None:
    """Check that modules run again in the backward pass if and only if this is declared."""
    facts = subject.setup.facts
    if "compiles" in facts:
        return None  # in a compiled graph, function calls cannot be counted
    recomputes = _run_again(subject) > _run_again(
        attrs.evolve(subject, setup=af.chain())
    )
    if recomputes and "recomputes" not in facts:
        return "modules run again in the backward pass. Declare the fact recomputes."
    if not recomputes and "recomputes" in facts:
        return "it declares the fact recomputes, but no module ran again in the backward pass."
    return None


class _Layers(TorchFunctionMode):
    """A mode that counts calls of layer functions in a backward pass."""

    count = 0

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call a function. Count it if it is a layer function in a backward pass."""
        # torch has no public function that tells whether a backward pass runs
        self.count += func in _LAYERS and torch._C._current_graph_task_id() >= 0
        return func(*args, **(kwargs or {}))


_LAYERS = (nn.functional.linear, nn.functional.dropout, torch.tanh)


def _run_again(subject: Subject) -> int:
    """Return the number of layer functions that are called in the first backward pass."""

    def rank(world: af.World) -> int:
        state = subject.start(world)
        batch = next(iter(af.batches(state)))
        with _Layers() as layers:
            af.make_step(_loss)(state, batch, 1.0)
        return layers.count

    return simulate(1, rank)[0]


def _other_parts(subject: Subject) -> str | None:
    """Check that the number of losses equals the number of micro-batches that a fact declares."""
    losses = 0

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        nonlocal losses
        losses += 1
        return _loss(model, batch, 1.0)

    def rank(world: af.World) -> int:
        state = subject.start(world)
        batch = next(iter(af.batches(state)))
        (parts_of,) = state.setup.facts["micro_batches"]
        af.make_step(loss)(state, batch)
        return len(parts_of(batch))

    parts = simulate(1, rank)[0]
    if parts == losses:
        return None
    return (
        f"its fact micro_batches returns {parts} micro-batches, but a step called the loss"
        f" function for {losses}. Both numbers must be equal."
    )


_LEAST = 4  # an epoch has three updates, so the last update is in the second epoch
_TRIED = (5, 9, 17, 33)
_NUM_CUTS = 10
_SHARES, _ENGINE = af.shard_data(), af.wrap_ddp()


def check_transform(
    transform: Any,
    *,
    sizes: Sequence[int] = (1, 2, 4),
    problems: Sequence[Problem] = PROBLEMS,
    updates: int | None = None,
) -> None:
    """Check that a transform keeps the laws that all transforms must keep.

    `check_transform` trains small models with the transform in simulated worlds. It adds
    `shard_data` and `wrap_ddp`, unless the transform replaces them. The transform must break
    each law that it names in `gives_up`. If the transform has the fact `sees_skips`, one update
    is skipped.

    | law | property |
    | --- | --- |
    | `value` | two transforms with equal options are equal, and have the same hash |
    | `inputs_unchanged` | a method does not change its arguments in place, except the slot \
of its transform and the gradients. `after_update` and `finalize` may also change the \
tensors of the state |
    | `own_slot` | the transform adds no slot except its own. An update does not remove the \
slot, or change the dtypes in it |
    | `drops_nothing` | a method returns all gradients and parameters that it got, and does \
not change `step`, `num_skipped`, `cursor` or `seed` of the state |
    | `groups_apart` | the values that `hyper` returns for a parameter group do not depend \
on another group's learning rate |
    | `takes_what_it_is_given` | `grads` and `eval_params` use their first argument or \
replace it. They do not read the gradients or parameters from the argument `update` or the \
state instead |
    | `skips_whole` | if another transform skips an update, parameters, optimizer state and \
slots stay unchanged |
    | `trains` | training changes the parameters |
    | `keeps_frozen` | frozen parameters do not change |
    | `merges_all` | `merge` uses every rank's value of the slot entries that are declared \
`by_rank` |
    | `passes_on` | wrappers of a loss or `value_and_grad` pass on the arguments after the \
batch, `into=` and `sync=` |
    | `evaluates_purely` | calls of `eval_params` and `hyper` between updates do not change \
the run |
    | `owes_once` | a second call of `finalize` changes nothing. After `finalize`, all \
ranks have the same parameters |
    | `loads_anywhere` | a state with the transform's slot can be saved on some number of \
ranks, and loaded on more and on fewer ranks |
    | `memory_in_state` | if a run starts again from the same state, it gives the same \
results |
    | `leaves_settings` | the transform does not change torch's settings, such as the \
default dtype |
    | `no_environment` | environment variables, such as `RANK`, do not change the run |
    | `own_randomness` | the transform does not use or advance the random generators of the \
process |
    | `forks_apart` | two copies of a state that train in turns give the same results as \
one copy by itself |
    | `any_schedule` | the results do not depend on the order in which ranks take turns |
    | `replicas_agree` | all ranks have the same parameters, optimizer state and slots, \
except slot entries that the transform declares `by_rank` |
    | `reduces_to_mean` | `reduce` returns the weighted mean over all ranks, within 5 % |
    | `sends_all_later` | if `reduce` gives up `reduces_to_mean`, it sends everything that \
it leaves out within the next 200 updates, within 2 %. If the transform has a method \
`merge`, this is also true after a change of the number of ranks. A majority vote must give \
up this law |
    | `resumes` | if the run is saved and loaded after any update, it continues bitwise \
equal |
    | `splits_alike` | on several ranks, in micro-batches, and under `wrap_fsdp`, the \
results equal the results of one rank without micro-batches, up to rounding |
    | `new_process` | a saved run continues with the same results in a new process |
    | `facts` | the facts that the transform declares are true, for example that it draws \
no random numbers, recomputes, or checks for non-finite numbers |
    | `acts` | in the tested updates, each method changed something or communicated. \
Otherwise the other laws would not test the method. `init`, `merge`, `engine`, `module` and \
`finalize` are exempt |
    | `options_read` | the methods, or functions that they call, read each option of the \
transform |

    Args:
        transform: an instance of a class with `@af.transform`, or a chain.
        sizes: the sizes of the worlds.
        problems: the training problems.
        updates: the number of updates. Default: a number from 4 to 33, so that each of `grads`,
            `hyper` and `after_update` acts and another update follows. If possible, `finalize`
            also has something to do after the last update.

    Raises:
        LawError: the transform breaks a law, or keeps a law that it names in `gives_up`.
        ArgumentError: `transform` is not a transform, or `gives_up` names an unknown law.

    Cost: about 250 runs of four updates, 9 s on one core. Runs of more than nine updates are
    saved and loaded after only ten of their updates.

    Example:
        >>> import accelfn as af
        >>> check_transform(af.clip_grad_norm(1.0), sizes=[2])
    """
    if not contract.is_transform(transform):
        msg = f"check_transform({transform!r}): expected a transform, such as af.ema(0.9)."
        raise ArgumentError(msg)
    full = af.chain(transform)
    members, given_up = full.transforms, full.gives_up()
    laws = {
        name: law
        for name, (law, methods) in _LAWS.items()
        if not methods or name in given_up or any(map(full.owners.get, methods))
        if name != "sends_all_later" or "reduces_to_mean" in given_up
    }
    names = sorted({*laws, "acts", "options_read", "new_process"})
    unknown = sorted(given_up.keys() - set(names))
    if unknown:
        msg = (
            f"{transform!r}: gives_up names unknown laws: {', '.join(unknown)}. The laws are"
            f" {', '.join(names)}."
        )
        raise ArgumentError(msg)
    call = "check_transform"
    arguments.check_sizes(call, sizes)
    if updates is not None:
        arguments.check_integer(call, "updates", updates, 1, "a number of updates")
    other = attrs.evolve(problems[0], seed=problems[0].seed + 1)
    # pickle the transforms before they run, so that the new process starts as this process did
    anew = cloudpickle.dumps(partial(_subject, members, other, max(sizes)))
    acting, number = _acting(members, problems, max(sizes), updates)
    laws |= {**acting, "new_process": partial(new_process, anew)}
    cases = product(problems, sizes)
    subjects = [_subject(members, problem, size, number) for problem, size in cases]
    subject = _subject(members, other, max(sizes), number)
    for name, law in laws.items():
        broken = first_broken(law, [subject] if name == "new_process" else subjects)
        if broken and name not in given_up:
            msg = f"{transform!r} breaks the law {name!r}: {broken}"
            raise LawError(msg)
        if not broken and name in given_up and max(sizes) > 1:
            msg = (
                f"{transform!r} names the law {name!r} in gives_up ({given_up[name]}), but keeps"
                f" this law in all {len(subjects)} cases. Remove the law from gives_up."
            )
            raise LawError(msg)


def _setup(
    *members: Any, outside: Any = None, shares: Any = _SHARES, engine: Any = _ENGINE
) -> af.chain:
    """Return a chain of the transforms. Add `shares` and `engine` if the transforms lack them."""
    full = af.chain(*members)
    if any(isinstance(member, af.shard_data) for member in members):
        shares = None
    if full.owners["engine"] or full.owners["reduce"]:
        engine = None
    last = skips_updates(once=True) if "sees_skips" in full.facts else None
    return af.chain(outside, shares, engine, *members, last)


def _acting(
    members: Sequence[Any],
    problems: Sequence[Problem],
    size: int,
    updates: int | None,
) -> tuple[dict[str, Law], int]:
    """Return the laws `acts` and `options_read`, and the number of updates for all laws."""
    number, acts, idlers = 0, dict[str, set[int]](), list[str]()
    for number in _TRIED if updates is None else (updates,):
        trials = [_subject(members, p, min(size, 2), number) for p in problems]
        first_broken(partial(observe_acts, acts), trials)
        idlers = idle_methods(members, acts, size)
        if not idlers:
            break
    idle = first(
        f"{name} changed nothing and did not communicate in {number}"
        f" update{'s' * (number > 1)}, so the laws did not test it. Choose options with which"
        " the method acts sooner, or pass more updates=. If the method only reads, write"
        ' gives_up = {"acts": "it only reads"}.'
        for name in idlers
    )
    without_effect = first(
        f"no code reads {name}, so this option has no effect. Use it, or remove it."
        for name in (f"{t!r}.{option}" for t in members for option in _options(t))
        if name not in acts
    )
    laws: dict[str, Law] = {
        "acts": lambda _: idle,
        "options_read": lambda _: without_effect,
    }
    return laws, updates or _count_updates(acts)


def _count_updates(acts: Acted) -> int:
    """Return a number of updates that lets each method act, if possible also `finalize`."""
    ends = [name for name in acts if name.endswith(".finalize")]
    firsts = [min(acts[name]) for name in acts if name not in ends]
    least = max([_LEAST, *(first + 1 for first in firsts)])
    owing = [at for name in ends for at in acts[name] if at >= least]
    return min(owing, default=least)


def _subject(
    members: Sequence[Any], problem: Problem, size: int, updates: int
) -> Subject:
    return Subject(
        name=f"{problem!r} on {size} rank{'s' if size > 1 else ''}",
        size=size,
        updates=updates,
        begin=problem.state,
        advance=lambda state, _, number: problem.updates(state, number),
        members=members,
        build=_setup,
        setup=_setup(*members),
        end=_final_values,
        splits=not (problem.norm or problem.drop),
        num_cuts=_NUM_CUTS,
    )


def _final_values(state: af.TrainState) -> dict[str, Any]:
    """Return the evaluation parameters, and the parameters after `finalize`."""
    values = _gather("eval_params", af.eval_params(state), state.world)
    return values | _gather("finalize.params", af.finalize(state).params, state.world)


def _gather(kind: str, params: Mapping[str, Any], world: af.World) -> dict[str, Any]:
    full = collectives.gather_full(params, world, label="compare states")
    return {f"{kind}[{name!r}]": param.clone() for name, param in full.items()}


def is_value(subject: Subject) -> str | None:
    """Two transforms with equal options are equal, and have the same hash."""
    for transform in subject.members:
        same = attrs.evolve(transform)
        if same != transform:
            return "a copy with the same options is not equal to the transform."
        try:
            if hash(same) != hash(transform):
                return "two equal copies of it have different hashes."
        except TypeError as error:
            return f"it has no hash ({error}). Use hashable options, such as a tuple for a list."
    return None


_LAWS: Mapping[str, tuple[Law, tuple[str, ...]]] = {
    "value": (is_value, ()),
    "memory_in_state": (COMMON["memory_in_state"], ()),
    "own_randomness": (COMMON["own_randomness"], ()),
    **METHOD_LAWS,
    "trains": (trains, ()),
    "facts": (true_facts, ()),
    **{name: (law, ()) for name, law in COMMON.items()},
    # last, because other laws explain the same mistakes better
    "loads_anywhere": (loads_anywhere, ("init",)),
    "keeps_frozen": (keeps_frozen, ()),
    "merges_all": (merges_all, ("merge",)),
    "splits_alike": (splits_alike, ()),
    "sends_all_later": (sends_all_later, ("reduce",)),
}
"""The laws in the order of the tests, each with the methods that it is about, if any."""
