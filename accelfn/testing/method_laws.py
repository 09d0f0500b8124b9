# SPDX-License-Identifier: Apache-2.0
"""Laws about single methods of a transform. A law applies if the transform has the method."""

import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial, wraps
from itertools import islice
from types import MappingProxyType
from typing import Any, TypeAlias

import attrs
import torch
from torch import nn
from torch.nn.utils import get_total_norm

import accelfn as af
from accelfn.errors import CompositionError, GradsError
from accelfn.plug import GradInfo, tree
from accelfn.plug import transform as contract
from accelfn.plug import update as moment
from accelfn.testing.comparing import BITWISE, entries, first_difference, leaves
from accelfn.testing.laws import (
    NEARLY_EQUAL,
    History,
    Law,
    Subject,
    differ,
    first,
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


ACTS = ("grads", "hyper", "after_update", "reduce", "eval_params")
"""Methods that act if they change their arguments or communicate."""
_METHODS = ("init", *ACTS, "finalize")


def _protected_tensors(
    value: Any, *, owner: str, field: str
) -> dict[str, torch.Tensor]:
    """Return, by name, the tensors that a method must not change in this argument."""
    if isinstance(value, (af.TrainState, af.Update)):
        state = value if isinstance(value, af.TrainState) else value.state
        is_new = field in _IN_PLACE  # the step has updated the old state in place
        slots = value.slots if is_new else state.slots
        other_slots = {name: slot for name, slot in slots.items() if name != owner}
        tensors = _tensors("slots", other_slots)
        for part in () if is_new else ("params", "buffers", "opt_state"):
            tensors |= _tensors(part, getattr(state, part))
        return tensors
    if isinstance(value, nn.Module):
        return {f"parameter {n!r}": p for n, p in value.named_parameters()}
    if isinstance(value, af.Grads) or field in _METHODS:
        return {}
    if isinstance(value, af.Batch):
        value = value.micro_batches
    inputs = enumerate(tree.tensor_leaves(value))
    return {f"tensor {i} of the batch": tensor for i, tensor in inputs}


def _tensors(path: str, value: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of a tree by path."""
    return {p: t for p, t in leaves(path, value) if isinstance(t, torch.Tensor)}


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

    def call(_: str, method: Any, self: Any, grads: af.Grads, *rest: Any) -> Any:
        update: af.Update = rest[1]
        means = _mean(grads, update.world)
        output = method(self, grads, *rest)
        new_grads: af.Grads = output[0]
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


def sends_all_later(subject: Subject) -> str | None:
    """`reduce` later sends what it left out, on any number of ranks."""
    merging = [m for m in subject.members if contract.has_field(m, "merge")]

    def begin(world: af.World) -> _Reduced:
        return _sum_reduced(subject.start(world), range(1), _LARGE)

    def resume(world: af.World) -> _Reduced:
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
    note = f" (the last {_ROUNDS} on {size} rank{'s' * (size > 1)})" if merging else ""
    return (
        f"over {1 + _ROUNDS} updates{note}, the sum of reduce's results differs from the sum"
        f" of the weighted means by {off:.2g} times its norm. Keep the unsent rest of a"
        " gradient in the slot, send it later, and divide it among the new ranks in merge."
        ' Or write gives_up = {"sends_all_later": "it is a vote"}.'
    )


def _sum_reduced(state: af.TrainState, steps: range, size: float) -> _Reduced:
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
    grads = af.Grads(totals, taken=info, reduced=True)
    update = af.Update(state=state, slots=state.slots, grads=grads)
    sums = dict.fromkeys(totals, 0.0)
    for step in steps:
        at = attrs.evolve(update, state=attrs.evolve(state, step=step))
        copies = grads.map(torch.clone)
        result, update = moment.apply_transforms("reduce", copies, at, af.Grads)
        for name, grad in result.tensors.items():
            sums[name] = sums[name] + grad.double() / result.taken.scale
    means = {name: mean * len(steps) for name, mean in _mean(grads, world).items()}
    return sums, means, tree.clone(dict(update.slots))


def _mean(grads: af.Grads, world: af.World) -> Tensors:
    """Return the weighted mean of all ranks' gradients."""
    weight = torch.as_tensor(grads.weight, dtype=torch.float64)
    totals = {name: grad.double() for name, grad in grads.tensors.items()}
    sums, total_weight = af.all_reduce((totals, weight), world, label=_LABEL)
    return {name: total / total_weight for name, total in sums.items()}


def own_slot(subject: Subject) -> str | None:
    """A transform adds only its own slot, and keeps the slot."""
    names = {transform.name for transform in subject.setup}
    owners = {t.name for t in subject.setup if contract.has_field(t, "init")}

    def rank(world: af.World) -> str | None:
        state = subject.start(world)
        present = {name for name in owners if state.slots.get(name) is not None}
        before = _tensors("slots", state.slots)
        dtypes = {path: tensor.dtype for path, tensor in before.items()}
        state = subject.after(state, 1)
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
        for path, tensor in _tensors("slots", state.slots).items():
            old, new = dtypes.get(path, tensor.dtype), tensor.dtype
            if old != new:
                return f"an update changed the dtype of {path} from {old} to {new}."
        return None

    return simulate(subject.size, rank)[0]


_NUMBERS = ("step", "num_skipped", "cursor", "seed")


def _watch_losses(transform: Any, report: Report) -> Any:
    """Return an equal transform that reports lost gradients or parameters, or changed numbers."""

    def call(field: str, method: Any, self: Any, value: Any, *rest: Any) -> Any:
        new_value, slot = method(self, value, *rest)
        if isinstance(value, af.TrainState):
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
    return value.tensors if isinstance(value, af.Grads) else value


def _watch_groups(transform: Any, report: Report) -> Any:
    """Return an equal transform that reports if `hyper` lets group 1 depend on group 0."""

    def call(_: str, method: Any, self: Any, hyper: Any, *rest: Any) -> Any:
        slot, update = rest
        variant = {n: e * 2 if n == (0, "lr") else e for n, e in hyper.items()}
        other = _try_out(method, self, MappingProxyType(variant), slot, update)
        result = method(self, hyper, slot, update)
        groups = update.state.definition.optimizer.param_groups
        one, two = (moment.override_hyper(groups, {}, h) for h in (result[0], other))
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

        def result(by: int, at: af.Update) -> Any:
            variant = _change_numbers(value, by)
            return dict(_by_name(_try_out(method, self, variant, slot, at)))

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


def _try_out(
    method: Any, transform: Any, value: Any, slot: Any, update: af.Update
) -> Any:
    """Return a method's new value; each call draws the same, and the slot does not change."""
    with torch.random.fork_rng(devices=[]):
        return method(transform, value, tree.clone(slot), update)[0]


def _change_numbers(value: Any, by: int) -> Any:
    """Return a copy of gradients or parameters. Unless `by` is 1, the values are changed."""

    def move(tensor: torch.Tensor) -> torch.Tensor:
        moves = by != 1 and tensor.is_floating_point()
        return tensor * by + 1 if moves else tensor.clone()

    if isinstance(value, af.Grads):
        return value.map(move)
    return {name: move(tensor) for name, tensor in value.items()}


def _with_value(update: af.Update, value: Any) -> af.Update:
    if isinstance(value, af.Grads):
        return update.with_grads(value)
    return attrs.evolve(update, state=attrs.evolve(update.state, params=value))


def skips_whole(subject: Subject) -> str | None:
    """A skipped update does not change params, opt_state and slots."""
    often = attrs.evolve(skips_updates(), name="skips_often")
    is_moved = "sees_skips" in subject.setup.facts
    parts = ("params", "opt_state", *(() if is_moved else ("slots",)))
    try:
        trial = attrs.evolve(subject, setup=af.chain(subject.setup, often))
    except CompositionError:
        return None  # the transform does not allow skips

    def rank(world: af.World) -> str | None:
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

    broken = subject.on_any_rank(rank)
    return broken and (
        f"an update that another transform skipped changed {broken}. In methods that run"
        " before after_update, return a new slot and do not change the slot argument in"
        " place. In after_update, check update.skipped."
    )


@af.transform
class skips_updates:
    """A transform that skips two of every five updates, but not two in a row.

    With `once`, it skips only the second update, to test transforms that act on skips.
    """

    once: bool = False

    def grads(
        self, grads: af.Grads, slot: None, update: af.Update
    ) -> tuple[af.Grads, None]:
        """Skip an update on all ranks."""
        number = update.num_tried
        skip = number == 1 if self.once else number % 5 in (1, 4)
        return grads.with_skip(skip, agreed=True), slot


def passes_on(subject: Subject) -> str | None:
    """Wrappers of a loss or of `value_and_grad` pass on their arguments."""
    splits = af.chain(*subject.members).owners["data"]
    outside = None if splits else af.accumulate(num_micro_batches=2)
    calls, extras = list[_Arrived](), list[tuple[Any, ...]]()

    def loss(model: nn.Module, batch: Any, *args: Any) -> Any:
        extras.append(args)
        inputs, targets = batch
        return (model(inputs) - targets).square().sum(1).mean()

    try:
        setup = af.chain(outside, subject.setup, _innermost(calls))
    except CompositionError:
        return None  # the transform does not allow micro-batches

    def rank(world: af.World) -> None:
        state = subject.start(world).with_setup(setup)
        af.make_step(loss)(state, next(iter(af.batches(state))), _EXTRA)

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


_EXTRA = "an extra"
_Arrived: TypeAlias = tuple[bool, bool]
"""For a call of the innermost function: whether it got `into=`, and the value of `sync=`."""


def _innermost(calls: list[_Arrived]) -> Any:
    """Return a transform that records how the innermost function is called."""

    @af.transform
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


def evaluates_purely(subject: Subject) -> str | None:
    """Evaluation between updates does not change the results of the run."""

    def advance(
        states: af.TrainState, offset: int, number: int
    ) -> Iterator[tuple[af.TrainState, Any]]:
        for state, metrics in subject.advance(states, offset, number):
            for _ in range(2):
                af.eval_params(state)
                _ = state.lrs  # this calls `hyper`
            yield state, metrics

    again = attrs.evolve(subject, advance=advance).histories()
    runs = "a run, and the same run with an evaluation between updates,"
    advice = "Return new tensors from eval_params. Change nothing in hyper: state.lrs calls it."
    return differ(subject.plain, again, runs, advice)


def owes_once(subject: Subject) -> str | None:
    """After `finalize`, all ranks have equal parameters. A second call changes nothing."""

    def rank(world: af.World) -> tuple[History, History]:
        once, again = History(), History()
        for state, _ in subject.advance(subject.start(world), 0, subject.updates):
            paid = af.finalize(state.copy())
            once.append(state_contents(paid, {}))
            again.append(state_contents(af.finalize(paid), {}))
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


def merges_all(subject: Subject) -> str | None:
    """The result of `merge` depends on every rank's `by_rank` entries."""
    merging = [m for m in subject.members if contract.has_field(m, "merge")]

    def rank(world: af.World) -> str | None:
        slots = subject.after(subject.start(world), subject.updates).slots
        return first(
            _merge_mistake(m, tree.clone(slots[m.name]), world) for m in merging
        )

    return subject.on_any_rank(rank)


def _merge_mistake(transform: Any, slot: Any, world: af.World) -> str | None:
    """Return how a second merge changes its result, or which rank's entry `merge` ignores."""

    def merge(slots: list[Any]) -> Any:
        return transform.merge(tree.clone(slots), world)

    copies = [slot] * world.size
    result = merge(copies)
    again = merge([result[1]] * world.size)
    change = first(NEARLY_EQUAL.differences("merge", result[1], again[1]))
    if change:
        return (
            f"{transform!r}.merge changes its own result: it merged {world.size} copies of a"
            f" merged slot into a different slot: {change}."
        )
    for name in contract.facts_of(transform).get("by_rank", ()):
        other = _plus_one(slot, name)
        if world.size == 1 or not any(BITWISE.differences("", slot, other)):
            continue
        for place in range(world.size):
            inputs = [*copies[:place], other, *copies[place + 1 :]]
            if not any(BITWISE.differences("", result, merge(inputs))):
                return (
                    f"{transform!r}.merge does not use rank {place}'s value of {name!r}. It would"
                    " be lost on another number of ranks. Use all slots of the argument."
                )
    return None


def _plus_one(slot: Any, entry: str) -> Any:
    """Return a copy of a slot with 1 added to the numbers of an entry."""

    def plus(leaf: Any) -> Any:
        is_number = isinstance(leaf, (int, float, torch.Tensor))
        return leaf + 1 if is_number and not isinstance(leaf, bool) else leaf

    return {**slot, entry: tree.tree_map(plus, slot[entry])} if entry in slot else slot


def loads_anywhere(subject: Subject) -> str | None:
    """A state that was saved on some number of ranks loads on more and on fewer ranks."""
    for size in {1, subject.size + 1}:
        with tempfile.TemporaryDirectory() as folder:
            subject.save_after(2, folder)
            try:
                other = attrs.evolve(subject, size=size, updates=3)
                other.resume_from(2, folder)
            except Exception as error:  # noqa: BLE001 - any error breaks the law
                return (
                    f"saved with {subject.size} and loaded with {size} ranks, the run raised"
                    f" {type(error).__name__}: {error} If slots differ between ranks, define"
                    " merge(slots, world) -> (weights, slot)."
                )
    return None


def _none_reported(watch: Callable[[Any, Report], Any], subject: Subject) -> str | None:
    """The watched transforms report no mistake in a run."""
    notes: list[str] = []
    # create the state with the watched setup, so that `init` is watched too
    subject.watch_members(lambda member: watch(member, notes.append)).histories()
    return first(notes)


METHOD_LAWS: Mapping[str, tuple[Law, tuple[str, ...]]] = {
    "inputs_unchanged": (partial(_none_reported, watch_inputs), ()),
    "own_slot": (own_slot, ()),
    "drops_nothing": (partial(_none_reported, _watch_losses), ()),
    "skips_whole": (skips_whole, ()),
    "reduces_to_mean": (partial(_none_reported, watch_mean), ("reduce",)),
    "groups_apart": (partial(_none_reported, _watch_groups), ("hyper",)),
    "takes_what_it_is_given": (
        partial(_none_reported, _watch_flow),
        ("grads", "eval_params"),
    ),
    "passes_on": (passes_on, ("loss", "value_and_grad")),
    "evaluates_purely": (evaluates_purely, ("eval_params", "hyper")),
    "owes_once": (owes_once, ("finalize",)),
}
"""The laws that explain mistakes best, by name, each with the methods that it is about."""
