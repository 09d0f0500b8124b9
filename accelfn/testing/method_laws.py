# SPDX-License-Identifier: Apache-2.0
"""Laws about single methods of a transform. A law applies if the transform has the method."""

import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial, wraps
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

import attrs
import torch
from torch import nn
from torch.nn.utils import get_total_norm

from accelfn import (
    Batch,
    Grads,
    TrainState,
    Update,
    World,
    accumulate,
    all_reduce,
    batches,
    chain,
    eval_params,
    finalize,
    make_step,
)
from accelfn import transform as transform_of
from accelfn.errors import CompositionError, GradsError
from accelfn.plug import GradInfo, tree
from accelfn.plug import transform as contract
from accelfn.plug import update as moment
from accelfn.testing.comparing import BITWISE, entries, first_difference, leaves
from accelfn.testing.laws import (
    NEARLY_EQUAL,
    Around,
    History,
    Law,
    Subject,
    differ,
    state_contents,
)
from accelfn.testing.simulate import simulate

Report: TypeAlias = Callable[[str], None]
"""A function that records a sentence about each mistake of a watched transform."""

_IN_PLACE = frozenset({"after_update", "finalize"})
"""Methods that may change the state's tensors in place."""
_NEW = "Return new tensors instead."


def watch_inputs(transform: Any, report: Report) -> Any:
    """Return an equal transform that reports forbidden in-place changes of its inputs.

    A method may change the slot of its transform and the gradients in place. `after_update` and
    `finalize` may also change the tensors of the state. A method must not change the state
    before the update, other slots, or a batch.
    """

    def watch(field: str, owner: str, function: Any, *args: Any, **named: Any) -> Any:
        inputs: dict[str, torch.Tensor] = {}
        for value in args:
            inputs |= _protected_tensors(value, owner=owner, field=field)
        before = tree.clone(inputs)
        result = function(*args, **named)
        for name in BITWISE.by_name(before, inputs):
            report(f"{transform!r}.{field} changed {name} in place. {_NEW}")
        return result

    def call(field: str, method: Any, self: Any, *args: Any) -> Any:
        return watch(field, self.name, partial(method, self), *args)

    def wrap(field: str, method: Any, self: Any, inner: Any, *args: Any) -> Any:
        outer, slot = method(self, inner, *args)
        return partial(watch, field, "", outer), slot

    return intercept(intercept(transform, _METHODS, call), contract.WRAPPERS, wrap)


def with_methods(transform: Any, methods: Mapping[str, Any]) -> Any:
    """Return a transform with the same options and name, but with other methods or facts."""
    kind = type(transform)
    body = {"__slots__": (), "__module__": kind.__module__, **methods}
    copy = object.__new__(type(kind.__name__, (kind,), body))
    for field in attrs.fields(kind):
        object.__setattr__(copy, field.name, getattr(transform, field.name))
    return copy


def intercept(transform: Any, fields: Iterable[str], call: Callable[..., Any]) -> Any:
    """Return an equal transform with methods that run `call(field, method, self, ...)`."""
    kind = type(transform)

    def method_of(field: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def call_method(self: Any, *args: Any) -> Any:
            return call(field, method, self, *args)

        return call_method

    members = {field: getattr(kind, field, None) for field in fields}
    methods = {name: method_of(name, m) for name, m in members.items() if callable(m)}
    return with_methods(transform, methods)


_METHODS = (
    *("init", "grads", "hyper", "after_update"),
    *("reduce", "eval_params", "finalize"),
)


def _protected_tensors(
    value: Any, *, owner: str, field: str
) -> dict[str, torch.Tensor]:
    """Return, by name, the tensors that a method must not change in this argument."""
    if isinstance(value, (TrainState, Update)):
        state = value if isinstance(value, TrainState) else value.state
        is_new = field in _IN_PLACE  # the step has updated the old state in place
        slots = value.slots if is_new else state.slots
        parts = {f"slots[{n!r}]": slot for n, slot in slots.items() if n != owner}
        if not is_new:
            for part in ("params", "buffers", "opt_state"):
                entries = getattr(state, part).items()
                parts |= {f"{part}[{name!r}]": entry for name, entry in entries}
        return _tensors(parts)
    if isinstance(value, nn.Module):
        return {f"parameter {n!r}": p for n, p in value.named_parameters()}
    if isinstance(value, Grads) or field in _METHODS:
        return {}
    if isinstance(value, Batch):
        value = value.micro_batches
    leaves = tree.tensor_leaves(value)
    return {f"tensor {i} of the batch": leaf for i, leaf in enumerate(leaves)}


def _tensors(parts: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for name, part in parts.items():
        leaves = tree.tensor_leaves(part)
        tensors |= {f"{name} ({i})" if i else name: t for i, t in enumerate(leaves)}
    return tensors


# The laws of `reduce`, which must return the weighted mean over all ranks.


Tensors = Mapping[str, torch.Tensor]
_Reduced: TypeAlias = tuple[Mapping[str, Any], Mapping[str, Any], Mapping[str, Any]]

NEAR = 0.05
"""The allowed relative error of a reduced gradient, for transforms that compress gradients."""
_LABEL = "reduces_to_mean"
_ROUNDS, _IN_SUM = 200, 0.02
"""The number of further updates, and the fraction of all gradients that may then be unsent."""
_LARGE, _LITTLE = 10.0, 0.01
"""The scale of the first gradient, and of all later gradients."""


def watch_mean(transform: Any, report: Report) -> Any:
    """Return an equal transform that reports if `reduce` does not return the mean."""

    def call(_: str, method: Any, self: Any, grads: Grads, *rest: Any) -> Any:
        update: Update = rest[1]
        means = _mean(grads, update.world)
        output = method(self, grads, *rest)
        new_grads: Grads = output[0]
        missing = sorted(means.keys() - new_grads.tensors.keys())
        if missing:
            report(
                f"in update {update.num_tried}, reduce returned no gradient for {missing[0]!r}."
            )
        for name in means.keys() & new_grads.tensors.keys():
            result = new_grads.tensors[name].double() / new_grads.taken.scale
            size, error = means[name].norm(), (result - means[name]).norm()
            if not error <= NEAR * size:
                report(
                    f"in update {update.num_tried} on rank {update.world.rank}, the gradient of"
                    f" {name!r} that reduce returned differs from the weighted mean over all"
                    f" ranks by {float(error / size):.2g} times the mean's norm."
                )
        return output

    return intercept(transform, ["reduce"], call)


def sends_all(members: Sequence[Any]) -> Law:
    """Return the law that `reduce` later sends what it left out, on any number of ranks."""
    merging = [member for member in members if contract.has_field(member, "merge")]

    def law(subject: Subject) -> str | None:
        def begin(world: World) -> _Reduced:
            return _sum_reduced(subject.start(world), range(1), _LARGE)

        def resume(world: World) -> _Reduced:
            state, all_slots = subject.start(world), [slots for *_, slots in first_runs]
            slots = {} if merging else {**all_slots[world.rank]}
            for member in merging:
                by_rank = tree.clone([slots_of[member.name] for slots_of in all_slots])
                slots[member.name] = member.merge(by_rank, world)[1]
            state = attrs.evolve(state, slots={**state.slots, **slots})
            return _sum_reduced(state, range(1, 1 + _ROUNDS), _LITTLE)

        first_runs = simulate(subject.size, begin)
        size = (1 if subject.size > 1 else 2) if merging else subject.size
        sums, means, _ = zip(first_runs[0], simulate(size, resume)[0], strict=True)
        targets = {name: means[0][name] + means[1][name] for name in means[0]}
        missing = [sums[0][name] + sums[1][name] - targets[name] for name in targets]
        off = float(get_total_norm(missing) / get_total_norm([*targets.values()]))
        if off <= _IN_SUM:
            return None
        plural = "s" * (size > 1)
        note = f" (the last {_ROUNDS} on {size} rank{plural})" if merging else ""
        return (
            f"over {1 + _ROUNDS} updates{note}, the sum of reduce's results differs from the sum"
            f" of the weighted means by {off:.2g} times its norm. Keep the unsent rest of a"
            " gradient in the slot, send it later, and divide it among the new ranks in merge."
            ' Or write gives_up = {"sends_all_later": "it is a vote"}.'
        )

    return law


def _sum_reduced(state: TrainState, steps: range, size: float) -> _Reduced:
    """Run `reduce` in some updates. Return two sums (results, true means), and the slots."""
    world = state.world
    generator = torch.Generator().manual_seed(world.rank)
    # weights differ between ranks, and their sum is the same for any number of ranks
    weight = 20.0 * (world.rank + 1) / (world.size * (world.size + 1))
    totals = {
        name: size * weight * torch.randn(state.params[name].shape, generator=generator)
        for name in state.trainable
    }
    info = GradInfo(divisor=weight, shows_totals=True)
    grads = Grads(totals, taken=info, reduced=True)
    update = Update(state=state, slots=state.slots, grads=grads)
    sums = dict.fromkeys(totals, 0.0)
    for step in steps:
        at = attrs.evolve(update, state=attrs.evolve(state, step=step))
        copies = grads.map(torch.clone)
        result, update = moment.apply_transforms("reduce", copies, at, Grads)
        for name, grad in result.tensors.items():
            sums[name] = sums[name] + grad.double() / result.taken.scale
    means = {name: mean * len(steps) for name, mean in _mean(grads, world).items()}
    return sums, means, tree.clone(dict(update.slots))


def _mean(grads: Grads, world: World) -> Tensors:
    """Return the weighted mean of all ranks' gradients."""
    weight = torch.as_tensor(grads.weight, dtype=torch.float64)
    totals = {name: grad.double() for name, grad in grads.tensors.items()}
    sums, total_weight = all_reduce((totals, weight), world, label=_LABEL)
    return {name: total / total_weight for name, total in sums.items()}


def method_laws(members: Sequence[Any], build: Around) -> dict[str, Law]:
    """Return the laws that apply to the methods of the transforms, by name."""

    def reported_by(watch: Callable[[Any, Report], Any]) -> Law:
        """Return the law that the watched transforms report no mistake in a run."""

        def law(subject: Subject) -> str | None:
            notes: list[str] = []
            # create the state with the watched setup, so that `init` is watched too
            subject.within(build([watch(m, notes.append) for m in members])).histories()
            return notes[0] if notes else None

        return law

    given_up = chain(*members).gives_up()
    laws: dict[str, tuple[tuple[str, ...], Law]] = {
        "inputs_unchanged": ((), reported_by(watch_inputs)),
        "own_slot": ((), _own_slot(members, build)),
        "drops_nothing": ((), reported_by(_watch_losses)),
        "skips_whole": ((), _skips_whole(members, build)),
        "reduces_to_mean": (("reduce",), reported_by(watch_mean)),
        "groups_apart": (("hyper",), reported_by(_watch_groups)),
        "takes_what_it_is_given": (("grads", "eval_params"), reported_by(_watch_flow)),
        "passes_on": (("loss", "value_and_grad"), _passes_on(members, build)),
        "evaluates_purely": (("eval_params", "hyper"), _evaluates_purely),
        "owes_once": (("finalize",), _owes_once),
        "merges_all": (("merge",), _merges_all(members)),
        "loads_anywhere": (("init",), _loads_anywhere),
        "sends_all_later": (("reduce",), sends_all(members)),
    }
    return {
        name: law
        for name, (fields, law) in laws.items()
        if not fields
        or name in given_up
        or any(contract.has_field(m, field) for m in members for field in fields)
        if name != "sends_all_later" or "reduces_to_mean" in given_up
    }


def _own_slot(members: Sequence[Any], build: Around) -> Law:
    """Return the law that a transform adds only its own slot, and keeps the slot."""

    def law(subject: Subject) -> str | None:
        setup = build(members).transforms
        names = {transform.name for transform in setup}
        owners = {t.name for t in setup if contract.has_field(t, "init")}

        def rank(world: World) -> str | None:
            state = subject.start(world)
            present = {name for name in owners if state.slots.get(name) is not None}
            dtypes = _dtypes(state.slots)
            for after, _ in subject.advance(state, 0, 1):
                state = after
            foreign = sorted(set(state.slots) - names)
            if foreign:
                slots = ", ".join(map(repr, foreign))
                return f"it added the slots {slots}. Store values only in its own slot."
            missing = sorted(name for name in present if state.slots.get(name) is None)
            if missing:
                return (
                    f"init created the slot {missing[0]!r}, but after an update the slot is"
                    " None. Return the slot argument, or a new slot, from each method."
                )
            for path, dtype in _dtypes(state.slots).items():
                if dtypes.get(path, dtype) != dtype:
                    return f"an update changed the dtype of {path} from {dtypes[path]} to {dtype}."
            return None

        return simulate(subject.size, rank)[0]

    return law


def _dtypes(slots: Mapping[str, Any]) -> dict[str, torch.dtype]:
    return {
        path: leaf.dtype
        for path, leaf in leaves("slots", slots)
        if isinstance(leaf, torch.Tensor)
    }


_NUMBERS = ("step", "num_skipped", "cursor", "seed")


def _watch_losses(transform: Any, report: Report) -> Any:
    """Return an equal transform that reports lost gradients or parameters, or changed numbers."""

    def call(field: str, method: Any, self: Any, value: Any, *rest: Any) -> Any:
        new_value, slot = method(self, value, *rest)
        if isinstance(value, TrainState):
            names = (n for n in _NUMBERS if getattr(new_value, n) != getattr(value, n))
            for name in names:
                report(
                    f"{self!r}.{field} changes state.{name}. Only the step may change it."
                )
        else:
            missing = _by_name(value).keys() - _by_name(new_value).keys()
            for name in sorted(missing):
                report(f"{self!r}.{field} {_LOST[field].format(name)}")
        return new_value, slot

    methods = ("grads", "eval_params", "after_update", "finalize")
    return intercept(transform, methods, call)


_LOST = {
    "grads": (
        "returns no gradient for {!r}, so this parameter is not trained. Return zeros, or"
        " freeze the parameter with state.with_trainable."
    ),
    "eval_params": "does not return the parameter {!r}.",
}


def _by_name(value: Any) -> Mapping[str, torch.Tensor]:
    """Return the tensors of gradients or parameters."""
    return value.tensors if isinstance(value, Grads) else value


def _watch_groups(transform: Any, report: Report) -> Any:
    """Return an equal transform that reports if `hyper` lets group 1 depend on group 0."""

    def call(_: str, method: Any, self: Any, hyper: Any, *rest: Any) -> Any:
        slot, update = rest
        variant = {n: e * 2 if n == (0, "lr") else e for n, e in hyper.items()}
        with torch.random.fork_rng(devices=[]):  # the same draws in both calls
            other = method(self, MappingProxyType(variant), tree.clone(slot), update)
        result = method(self, hyper, slot, update)
        groups = update.state.definition.optimizer.param_groups
        one, two = (moment.override_hyper(groups, {}, r[0]) for r in (result, other))
        if any(n[0] and one.get(n) != two.get(n) for n in {**one, **two}):
            report(
                f"{self!r}.hyper returns other values for parameter group 1 if the learning rate"
                " of group 0 changes. Compute the values of a group only from values of the same"
                " group, and return {(group, name): value}."
            )
        return result

    return intercept(transform, ["hyper"], call)


def _watch_flow(transform: Any, report: Report) -> Any:
    """Return an equal transform that reports if a method ignores its first argument."""

    def call(field: str, method: Any, self: Any, value: Any, *rest: Any) -> Any:
        slot, update = rest

        def result(by: int, at: Update) -> Any:
            variant = _change_numbers(value, by)
            with torch.random.fork_rng(devices=[]):  # the same draws in all calls
                new_value, _ = method(self, variant, tree.clone(slot), at)
            return dict(_by_name(new_value))

        with_update = result(2, _with_value(update, _change_numbers(value, 2)))
        plain, only = result(1, update), result(2, update)
        if first_difference(only, with_update) and not first_difference(plain, only):
            report(
                f"{self!r}.{field} reads the {field} of the update instead of its first argument."
                " This undoes the transforms before it in the chain. Compute from the first"
                " argument."
            )
        return method(self, value, slot, update)

    return intercept(transform, ["grads", "eval_params"], call)


def _change_numbers(value: Any, by: int) -> Any:
    """Return a copy of gradients or parameters. Unless `by` is 1, the values are changed."""

    def move(tensor: torch.Tensor) -> torch.Tensor:
        moves = by != 1 and tensor.is_floating_point()
        return tensor * by + 1 if moves else tensor.clone()

    if isinstance(value, Grads):
        return value.map(move)
    return {name: move(tensor) for name, tensor in value.items()}


def _with_value(update: Update, value: Any) -> Update:
    if isinstance(value, Grads):
        return update.with_grads(value)
    return attrs.evolve(update, state=attrs.evolve(update.state, params=value))


def _skips_whole(members: Sequence[Any], build: Around) -> Law:
    """Return the law that a skipped update does not change params, opt_state and slots."""
    is_moved = any("sees_skips" in contract.facts_of(member) for member in members)
    parts = ("params", "opt_state", *(() if is_moved else ("slots",)))

    def law(subject: Subject) -> str | None:
        def rank(world: World) -> str | None:
            try:
                often = attrs.evolve(skips_updates(), name="skips_often")
                trial = subject.within(build([*members, often]))
            except CompositionError:
                return None  # the transform does not allow skips
            states = trial.advance(trial.start(world), 0, subject.updates)
            broken, num_skipped, previous = None, 0, dict[str, Any]()
            for state, _ in islice(states, subject.updates + 3):
                contents = entries(state, gather=True).items()
                # `report_metric` changes 'reported' between updates
                pairs = ((n, e) for n, e in contents if "'reported'" not in n)
                after = {n: e for n, e in pairs if n.startswith(parts)}
                if previous and state.num_skipped > num_skipped:
                    broken = broken or first_difference(previous, after)
                num_skipped, previous = state.num_skipped, after
            return broken

        broken = next(filter(None, simulate(subject.size, rank)), None)
        if not broken:
            return None
        return (
            f"an update that another transform skipped changed {broken}. In methods that run"
            " before after_update, return a new slot and do not change the slot argument in"
            " place. In after_update, check update.skipped."
        )

    return law


@transform_of
class skips_updates:
    """A transform that skips two of every five updates, but not two in a row.

    With `once`, it skips only the second update, to test transforms that act on skips.
    """

    once: bool = False

    def grads(self, grads: Grads, slot: None, update: Update) -> tuple[Grads, None]:
        """Skip an update on all ranks."""
        number = update.num_tried
        skip = number == 1 if self.once else number % 5 in (1, 4)
        return grads.with_skip(skip, agreed=True), slot


def _passes_on(members: Sequence[Any], build: Around) -> Law:
    """Return the law that wrappers of a loss or of `value_and_grad` pass on their arguments."""
    splits = any(contract.has_field(member, "data") for member in members)
    outside = None if splits else accumulate(num_micro_batches=2)

    def law(subject: Subject) -> str | None:
        calls, extras = list[_Arrived](), list[tuple[Any, ...]]()

        def loss(model: torch.nn.Module, batch: Any, *args: Any) -> Any:
            extras.append(args)
            inputs, targets = batch
            return (model(inputs) - targets).square().sum(1).mean()

        def rank(world: World) -> None:
            state = subject.start(world)
            try:
                setup = chain(outside, build(members), _innermost(calls))
            except CompositionError:
                return  # the transform does not allow micro-batches
            state = state.with_setup(setup)
            make_step(loss)(state, next(iter(batches(state))), _EXTRA)

        try:
            simulate(subject.size, rank)
        except GradsError:  # a micro-batch was added after the gradients were reduced
            mistake = None if outside is None else _lost_of_parts(calls)
            if mistake is None:
                raise
            return mistake
        except TypeError as error:
            return (
                "the function that loss or value_and_grad returned must accept the arguments"
                " (model, batch, *extras) or (state, batch, *extras, into=, sync=), but it"
                f" raised: {error}"
            )
        if any(args != (_EXTRA,) for args in extras):
            return "the loss did not get the step's extras. Pass *extras to the inner function."
        return None if outside is None else _lost_of_parts(calls)

    return law


_EXTRA = "an extra"
_Arrived: TypeAlias = tuple[bool, bool]
"""For a call of the innermost function: whether it got `into=`, and the value of `sync=`."""


def _innermost(calls: list[_Arrived]) -> Any:
    """Return a transform that records how the innermost function is called."""

    @transform_of
    class innermost:
        def value_and_grad(self, inner: Any, slot: Any, update: Any) -> Any:
            def seeing(*args: Any, into: Any = None, sync: bool = True) -> Any:
                calls.append((into is not None, sync))
                return inner(*args, into=into, sync=sync)

            return seeing, slot

    return innermost()


def _lost_of_parts(calls: Sequence[_Arrived]) -> str | None:
    if calls and not any(adds for adds, _ in calls):
        return "gradients of earlier micro-batches were lost. Pass into= to the inner function."
    if calls and all(sync for _, sync in calls):
        return (
            "ranks communicated in every micro-batch. Pass sync= to the inner function."
        )
    return None


def _evaluates_purely(subject: Subject) -> str | None:
    """Evaluation between updates does not change the results of the run."""

    def advance(
        states: TrainState, offset: int, number: int
    ) -> Iterator[tuple[TrainState, Any]]:
        for state, metrics in subject.advance(states, offset, number):
            for _ in range(2):
                eval_params(state)
                _ = state.lrs  # this calls `hyper`
            yield state, metrics

    again = attrs.evolve(subject, advance=advance).histories()
    runs = "a run, and the same run with an evaluation between updates,"
    advice = "Return new tensors from eval_params. Change nothing in hyper: state.lrs calls it."
    return differ(subject.plain, again, runs, advice)


def _owes_once(subject: Subject) -> str | None:
    """After `finalize`, all ranks have equal parameters. A second call changes nothing."""

    def rank(world: World) -> tuple[History, History]:
        once, again = History(), History()
        for state, _ in subject.advance(subject.start(world), 0, subject.updates):
            paid = finalize(state.copy())
            once.append(state_contents(paid, {}))
            again.append(state_contents(finalize(paid), {}))
        return once, again

    once, again = zip(*simulate(subject.size, rank, sums="ring"), strict=True)
    params = [
        [{n: e for n, e in row.items() if n.startswith("params")} for row in history]
        for history in once
    ]
    states = "the states after one and after two calls of finalize"
    ranks = "the parameters of rank 0 and of another rank after finalize"
    return differ(once, again, states) or differ(
        params[:1] * subject.size, params, ranks
    )


def _merges_all(members: Sequence[Any]) -> Law:
    """Return the law that the result of `merge` depends on every rank's `by_rank` entries."""
    merging = [member for member in members if contract.has_field(member, "merge")]

    def law(subject: Subject) -> str | None:
        def rank(world: World) -> str | None:
            state = subject.start(world)
            for after, _ in subject.advance(state, 0, subject.updates):
                state = after
            for member in merging:
                slot = state.slots[member.name]
                change, idle = _shares(member, tree.clone(slot), world)
                if change:
                    return (
                        f"{member!r}.merge changes its own result: it merged {world.size} copies"
                        f" of a merged slot into a different slot: {change}."
                    )
                if idle is not None:
                    return (
                        f"{member!r}.merge does not use rank {idle[0]}'s value of {idle[1]!r}. It"
                        " would be lost on another number of ranks. Use all slots of the argument."
                    )
            return None

        return next(filter(None, simulate(subject.size, rank)), None)

    return law


def _shares(
    transform: Any, slot: Any, world: World
) -> tuple[str | None, tuple[int, str] | None]:
    """Return how a second merge changes its result, and a rank's entry that `merge` ignores."""

    def merge(slots: list[Any]) -> Any:
        return transform.merge(tree.clone(slots), world)

    copies = [slot] * world.size
    result = merge(copies)
    again = merge([result[1]] * world.size)
    differences = NEARLY_EQUAL.differences("merge", result[1], again[1])
    change = next(map(str, differences), None)
    for name in contract.facts_of(transform).get("by_rank", ()):
        other = _plus_one(slot, name)
        if world.size == 1 or not any(BITWISE.differences("", slot, other)):
            continue
        for place in range(world.size):
            inputs = [*copies[:place], other, *copies[place + 1 :]]
            if not any(BITWISE.differences("", result, merge(inputs))):
                return change, (place, name)
    return change, None


def _plus_one(slot: Any, entry: str) -> Any:
    """Return a copy of a slot with 1 added to the numbers of an entry."""

    def plus(leaf: Any) -> Any:
        is_number = isinstance(leaf, (int, float, torch.Tensor))
        return leaf + 1 if is_number and not isinstance(leaf, bool) else leaf

    return {**slot, entry: tree.tree_map(plus, slot[entry])} if entry in slot else slot


def _loads_anywhere(subject: Subject) -> str | None:
    """A state that was saved on some number of ranks loads on more and on fewer ranks."""
    for size in {1, subject.size + 1}:
        with tempfile.TemporaryDirectory() as folder:
            subject.save_after(2, Path(folder))
            try:
                other = attrs.evolve(subject, size=size, updates=3)
                other.resume_from(2, Path(folder))
            except Exception as error:  # noqa: BLE001 - any error breaks the law
                return (
                    f"saved with {subject.size} and loaded with {size} ranks, the run raised"
                    f" {type(error).__name__}: {error} If slots differ between ranks, define"
                    " merge(slots, world) -> (weights, slot)."
                )
    return None
