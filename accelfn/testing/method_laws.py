# SPDX-License-Identifier: Apache-2.0
"""Laws about single methods of a transform; each applies if the transform has the method."""

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
from accelfn.testing.comparing import (
    entries,
    first_difference,
    leaves,
)
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

Seen: TypeAlias = Callable[[str], None]
"""Takes a sentence on each mistake that a watched transform makes."""

_IN_PLACE = frozenset({"after_update", "finalize"})
"""Methods that may change the state's tensors in place."""
_NEW = "Return new tensors instead."


def watch_inputs(transform: Any, seen: Seen) -> Any:
    """Return an equal transform that reports forbidden changes of its inputs.

    A method may change its own slot and its gradients in place, and after an update the
    tensors of the state. It must not change the state before the update, other slots, or a
    batch.
    """

    def watch(field: str, own: str, function: Any, *given: Any, **named: Any) -> Any:
        keep = _copy_inputs(given, own=own, field=field)
        returned = function(*given, **named)
        for name in keep():
            seen(f"{transform!r}.{field} changed {name} in place. {_NEW}")
        return returned

    def call(field: str, method: Any, self: Any, *given: Any) -> Any:
        return watch(field, self.name, partial(method, self), *given)

    def wrap(
        field: str, method: Any, self: Any, inner: Callable[..., Any], *given: Any
    ) -> Any:
        outer, slot = method(self, inner, *given)
        return partial(watch, field, "", outer), slot

    return intercept(intercept(transform, _METHODS, call), contract.WRAPPERS, wrap)


def with_methods(transform: Any, methods: Mapping[str, Any]) -> Any:
    """Return a transform of the same options and name, with other methods or facts."""
    kind = type(transform)
    body = {"__slots__": (), "__module__": kind.__module__, **methods}
    made = object.__new__(type(kind.__name__, (kind,), body))
    for field in attrs.fields(kind):
        object.__setattr__(made, field.name, getattr(transform, field.name))
    return made


def intercept(transform: Any, fields: Iterable[str], call: Callable[..., Any]) -> Any:
    """Return an equal transform that calls `call(field, method, self, ...)` for methods."""
    kind = type(transform)

    def method_of(field: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def call_method(self: Any, *args: Any) -> Any:
            return call(field, method, self, *args)

        return call_method

    own = {field: getattr(kind, field, None) for field in fields}
    methods = {field: method_of(field, m) for field, m in own.items() if callable(m)}
    return with_methods(transform, methods)


_METHODS = (
    *("init", "grads", "hyper", "after_update"),
    *("reduce", "eval_params", "finalize"),
)


def _copy_inputs(
    given: Iterable[Any], *, own: str, field: str
) -> Callable[[], list[str]]:
    """Copy protected tensors; return a function that lists the changed ones later."""
    tensors: dict[str, torch.Tensor] = {}
    for value in given:
        tensors |= _protected_tensors(value, own=own, field=field)
    copies = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    return lambda: [
        name for name, copy in copies.items() if not _same(copy, tensors[name].detach())
    ]


def _protected_tensors(value: Any, *, own: str, field: str) -> dict[str, torch.Tensor]:
    """Return the tensors of one argument that the method must not change, by name."""
    if isinstance(value, TrainState):
        return _of_state(value, own=own, all_but_slots=field not in _IN_PLACE)
    if isinstance(value, Update):
        if field in _IN_PLACE:  # the state before no longer owns its tensors
            return _of_slots(value.slots, own)
        return _of_state(value.state, own=own, all_but_slots=True)
    if isinstance(value, nn.Module):
        return {f"parameter {n!r}": p for n, p in value.named_parameters()}
    if isinstance(value, Grads) or field in _METHODS:
        return {}
    if isinstance(value, Batch):
        value = value.micro_batches
    leaves = tree.tensor_leaves(value)
    return {f"tensor {i} of the batch": leaf for i, leaf in enumerate(leaves)}


def _of_state(
    state: TrainState, *, own: str, all_but_slots: bool
) -> dict[str, torch.Tensor]:
    parts: dict[str, Any] = {}
    if all_but_slots:
        parts |= {f"params[{name!r}]": param for name, param in state.params.items()}
        parts |= {
            f"buffers[{name!r}]": buffer for name, buffer in state.buffers.items()
        }
        entries = state.opt_state.items()
        parts |= {f"opt_state[{name!r}]": dict(entry) for name, entry in entries}
    return _of_slots(state.slots, own) | _tensors(parts)


def _of_slots(slots: Mapping[str, Any], own: str) -> dict[str, torch.Tensor]:
    return _tensors({f"slots[{n!r}]": slot for n, slot in slots.items() if n != own})


def _tensors(parts: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for name, part in parts.items():
        leaves = tree.tensor_leaves(part)
        tensors |= {f"{name} ({i})" if i else name: t for i, t in enumerate(leaves)}
    return tensors


def _same(one: torch.Tensor, two: torch.Tensor) -> bool:
    return one.shape == two.shape and torch.equal(
        one.nan_to_num() if one.is_floating_point() else one,
        two.nan_to_num() if two.is_floating_point() else two,
    )


# Laws on `reduce`: it returns the weighted mean over all ranks.


Tensors = Mapping[str, torch.Tensor]
_Reduced: TypeAlias = tuple[Mapping[str, Any], Mapping[str, Any], Mapping[str, Any]]

NEAR = 0.05
"""Allowed relative error of a reduced gradient: a transform may send few bytes."""
_LABEL = "reduces_to_mean"
_ROUNDS, _IN_SUM = 200, 0.02
"""After so many more updates, at most this part of the first gradient is unsent."""
_LARGE, _LITTLE = 10.0, 0.01
"""Sizes of the first gradient and of later gradients."""


def watch_mean(transform: Any, seen: Seen) -> Any:
    """Return an equal transform that reports results of `reduce` other than the mean."""

    def call(
        _: str, method: Any, self: Any, grads: Grads, slot: Any, update: Update
    ) -> Any:
        means = _mean(grads, update.world)
        returned = method(self, grads, slot, update)
        reduced: Grads = returned[0]
        missing = sorted(means.keys() - reduced.tensors.keys())
        if missing:
            seen(f"in update {update.num_tried} it leaves out {missing[0]!r}")
        for name in means.keys() & reduced.tensors.keys():
            result = reduced.tensors[name].double() / reduced.taken.scale
            size, error = means[name].norm(), (result - means[name]).norm()
            if not error <= NEAR * size:
                seen(
                    f"in update {update.num_tried}, rank {update.world.rank}, the gradient of"
                    f" {name!r} differs from the weighted mean over all ranks by"
                    f" {float(error / size):.2g} times the mean's norm"
                )
        return returned

    return intercept(transform, ["reduce"], call)


def sends_all(members: Sequence[Any]) -> Law:
    """Return the law that gradients left out are sent later, though ranks join or leave."""
    merging = [member for member in members if contract.has_field(member, "merge")]

    def law(subject: Subject) -> str | None:
        def begin(world: World) -> _Reduced:
            return _sum_reduced(subject.start(world), range(1), _LARGE)

        def resume(world: World) -> _Reduced:
            state, saved = subject.start(world), [slots for *_, slots in first_runs]
            slots = {} if merging else {**saved[world.rank]}
            for each in merging:
                own = tree.clone([slots_of[each.name] for slots_of in saved])
                slots[each.name] = each.merge(own, world)[1]
            state = attrs.evolve(state, slots={**state.slots, **slots})
            return _sum_reduced(state, range(1, 1 + _ROUNDS), _LITTLE)

        first_runs = simulate(subject.size, begin)
        size = (1 if subject.size > 1 else 2) if merging else subject.size
        sums, means, _ = zip(first_runs[0], simulate(size, resume)[0], strict=True)
        wanted = {name: means[0][name] + means[1][name] for name in means[0]}
        missing = [sums[0][name] + sums[1][name] - wanted[name] for name in wanted]
        off = float(get_total_norm(missing) / get_total_norm([*wanted.values()]))
        if off <= _IN_SUM:
            return None
        moved = f", the last {_ROUNDS} of them on {size}" if merging else ""
        return (
            f"over {1 + _ROUNDS} updates{moved}, the sum of reduce's results differs from that"
            f" of the weighted means by {off:.2g} of its norm. Send later what an update leaves"
            " out, and share it among the new ranks in merge; or write"
            ' gives_up = {"sends_all_later": "it is a vote"}.'
        )

    return law


def _sum_reduced(state: TrainState, steps: range, size: float) -> _Reduced:
    """Return the sums of `reduce`'s results, the sums of the means, and the last slots."""
    world = state.world
    generator = torch.Generator().manual_seed(world.rank)
    # weights differ by rank, and have the same sum on any number of ranks
    weight = 20.0 * (world.rank + 1) / (world.size * (world.size + 1))
    totals = {
        name: size * weight * torch.randn(state.params[name].shape, generator=generator)
        for name in state.trainable
    }
    grads = Grads(
        totals, taken=GradInfo(divisor=weight, shows_totals=True), reduced=True
    )
    update = Update(state=state, slots=state.slots, grads=grads)
    sums = dict.fromkeys(totals, 0.0)
    for step in steps:
        at = attrs.evolve(update, state=attrs.evolve(state, step=step))
        result, update = moment.apply_transforms(
            "reduce", grads.map(torch.clone), at, Grads
        )
        for name, grad in result.tensors.items():
            sums[name] = sums[name] + grad.double() / result.taken.scale
    means = {name: mean * len(steps) for name, mean in _mean(grads, world).items()}
    return sums, means, tree.clone(dict(update.slots))


def _mean(grads: Grads, world: World) -> Tensors:
    """Return the weighted mean over all ranks."""
    weight = torch.as_tensor(grads.weight, dtype=torch.float64)
    totals = {name: grad.double() for name, grad in grads.tensors.items()}
    sums, whole = all_reduce((totals, weight), world, label=_LABEL)
    return {name: total / whole for name, total in sums.items()}


def method_laws(members: Sequence[Any], around: Around) -> dict[str, Law]:
    """Return the laws about methods that the transforms have, by name."""

    def have(*fields: str) -> bool:
        return any(
            contract.has_field(member, field) for member in members for field in fields
        )

    def reported_by(watch: Callable[[Any, Seen], Any]) -> Law:
        """Return the law that watched transforms report no mistake in a run."""

        def law(subject: Subject) -> str | None:
            seen: list[str] = []
            # the run begins in this setup, so that init is watched too
            subject.within(around([watch(m, seen.append) for m in members])).histories()
            return seen[0] if seen else None

        return law

    given_up = chain(*members).gives_up()
    laws: dict[str, tuple[tuple[str, ...], Law]] = {
        "inputs_unchanged": ((), reported_by(watch_inputs)),
        "own_slot": ((), _own_slot(members, around)),
        "drops_nothing": ((), reported_by(_watch_losses)),
        "skips_whole": ((), _skips_whole(members, around)),
        "reduces_to_mean": (("reduce",), reported_by(watch_mean)),
        "groups_apart": (("hyper",), reported_by(_watch_groups)),
        "takes_what_it_is_given": (("grads", "eval_params"), reported_by(_watch_flow)),
        "passes_on": (("loss", "value_and_grad"), _passes_on(members, around)),
        "evaluates_purely": (("eval_params", "hyper"), _evaluates_purely),
        "owes_once": (("finalize",), _owes_once),
        "merges_all": (("merge",), _merges_all(members)),
        "loads_anywhere": (("init",), _loads_anywhere),
        "sends_all_later": (("reduce",), sends_all(members)),
    }
    return {
        name: law
        for name, (fields, law) in laws.items()
        if not fields or have(*fields) or name in given_up
        if name != "sends_all_later" or "reduces_to_mean" in given_up
    }


def _own_slot(members: Sequence[Any], around: Around) -> Law:
    """Return the law that a transform adds and keeps its own slot, and no other."""

    def law(subject: Subject) -> str | None:
        setup = around(members).transforms
        names = {transform.name for transform in setup}
        expected = {t.name for t in setup if contract.has_field(t, "init")}

        def rank(world: World) -> str | None:
            state = subject.start(world)
            made = {name for name in expected if state.slots.get(name) is not None}
            dtypes = _dtypes(state.slots)
            for after, _ in subject.advance(state, 0, 1):
                state = after
            foreign = sorted(set(state.slots) - names)
            if foreign:
                return f"it made the slots {foreign}, not its own."
            lost = sorted(name for name in made if state.slots.get(name) is None)
            if lost:
                return (
                    f"the slot {lost[0]!r}, which init made, was None after an update."
                    " Return the slot argument, or the next slot."
                )
            for path, dtype in _dtypes(state.slots).items():
                if dtypes.get(path, dtype) != dtype:
                    return f"{path} was of {dtypes[path]}, and is of {dtype} after an update."
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


def _watch_losses(transform: Any, seen: Seen) -> Any:
    """Return an equal transform that reports lost gradients, parameters and numbers."""

    def call(field: str, method: Any, self: Any, value: Any, *given: Any) -> Any:
        returned = method(self, value, *given)
        if mistake := _LOST[field](value, returned):
            seen(f"{self!r}.{field} {mistake}")
        return returned

    return intercept(transform, _LOST, call)


def _lost_gradient(grads: Grads, returned: tuple[Grads, Any]) -> str | None:
    lost = sorted(grads.tensors.keys() - returned[0].tensors.keys())
    if not lost:
        return None
    return (
        f"drops the gradient of {lost[0]!r}, which is then not trained. Return zeros, or"
        " freeze the parameter: state.with_trainable."
    )


def _lost_parameter(
    params: Mapping[str, Any], returned: tuple[Mapping[str, Any], Any]
) -> str | None:
    lost = sorted(params.keys() - returned[0].keys())
    return f"leaves out the parameter {lost[0]!r}." if lost else None


def _changed_number(state: TrainState, returned: tuple[TrainState, Any]) -> str | None:
    for name in _NUMBERS:
        if getattr(returned[0], name) != getattr(state, name):
            return f"changes state.{name}, which is the step's own. Leave it alone."
    return None


def _watch_groups(transform: Any, seen: Seen) -> Any:
    """Return an equal transform that reports groups that depend on another group."""

    def call(
        _: str,
        method: Any,
        self: Any,
        hyper: Mapping[Any, Any],
        slot: Any,
        update: Update,
    ) -> Any:
        changed = {n: e * 2 if n == (0, "lr") else e for n, e in hyper.items()}
        with torch.random.fork_rng(devices=[]):  # both calls draw the same numbers
            other = method(self, MappingProxyType(changed), tree.clone(slot), update)
        returned = method(self, hyper, slot, update)
        groups = update.state.definition.optimizer.param_groups
        one, two = (
            moment.override_hyper(groups, {}, each[0]) for each in (returned, other)
        )
        if any(n[0] and one.get(n) != two.get(n) for n in {**one, **two}):
            seen(
                f"{self!r}.hyper gives parameter group 1 other numbers if group 0 has another"
                " learning rate. Compute each group's from its own: {(group, name): value}."
            )
        return returned

    return intercept(transform, ["hyper"], call)


def _watch_flow(transform: Any, seen: Seen) -> Any:
    """Return an equal transform that reports reading the update's value instead."""

    def call(field: str, method: Any, self: Any, value: Any, *given: Any) -> Any:
        slot, update = given

        def result(by: int, at: Update) -> Any:
            with torch.random.fork_rng(devices=[]):  # all calls draw the same numbers
                returned, _ = method(
                    self, _change_numbers(value, by), tree.clone(slot), at
                )
            return dict(getattr(returned, "tensors", returned))

        both = result(2, _with_value(update, _change_numbers(value, 2)))
        plain, only = result(1, update), result(2, update)
        if first_difference(only, both) and not first_difference(plain, only):
            seen(
                f"{self!r}.{field} takes the update's value, not its first argument. That"
                " undoes transforms to its left. Compute from the first argument."
            )
        return method(self, value, slot, update)

    return intercept(transform, ["grads", "eval_params"], call)


def _change_numbers(value: Any, by: int) -> Any:
    """Return a copy of gradients or parameters; with other numbers unless `by` is 1."""

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


_LOST: Mapping[str, Callable[..., str | None]] = {
    "grads": _lost_gradient,
    "eval_params": _lost_parameter,
    "after_update": _changed_number,
    "finalize": _changed_number,
}


def _skips_whole(members: Sequence[Any], around: Around) -> Law:
    """Return the law that a skipped update leaves parameters, optimizer and slots alone."""
    is_moved = any("sees_skips" in contract.facts_of(member) for member in members)
    parts = ("params", "opt_state", *(() if is_moved else ("slots",)))

    def law(subject: Subject) -> str | None:
        def rank(world: World) -> str | None:
            try:
                tried = subject.within(around([*members, skips_often()]))
            except CompositionError:
                return None  # the transform does not allow skips
            states = tried.advance(tried.start(world), 0, subject.updates)
            broken, skipped, kept = None, 0, dict[str, Any]()
            for state, _ in islice(states, subject.updates + 3):
                contents = entries(state, gather=True).items()
                after = {
                    n: e
                    for n, e in contents  # reports come between updates
                    if n.startswith(parts) and "'reported'" not in n
                }
                if kept and state.num_skipped > skipped:
                    broken = broken or first_difference(kept, after)
                skipped, kept = state.num_skipped, after
            return broken

        broken = next(filter(None, simulate(subject.size, rank)), None)
        if not broken:
            return None
        return (
            f"an update that another transform skipped changed {broken} Before after_update,"
            " return a new slot and leave the slot argument unchanged;"
            " in after_update, ask update.skipped."
        )

    return law


@transform_of
class skips_once:
    """Asks to skip the second update, for transforms that act on skips."""

    def grads(self, grads: Grads, slot: None, update: Update) -> tuple[Grads, None]:
        """Wish it on all ranks."""
        return grads.with_skip(update.num_tried == 1, agreed=True), slot


@transform_of
class skips_often:
    """Asks to skip two of five updates, never two in a row."""

    def grads(self, grads: Grads, slot: None, update: Update) -> tuple[Grads, None]:
        """Wish it on all ranks."""
        return grads.with_skip(update.num_tried % 5 in (1, 4), agreed=True), slot


def _passes_on(members: Sequence[Any], around: Around) -> Law:
    """Return the law that wrappers of a loss or a gradient pass on their arguments."""
    splits = any(contract.has_field(member, "data") for member in members)
    outside = None if splits else accumulate(num_micro_batches=2)

    def law(subject: Subject) -> str | None:
        arrived, extras = list[_Arrived](), list[tuple[Any, ...]]()

        def loss(model: torch.nn.Module, batch: Any, *given: Any) -> Any:
            extras.append(given)
            inputs, targets = batch
            return (model(inputs) - targets).square().sum(1).mean()

        def rank(world: World) -> None:
            state = subject.start(world)
            try:
                setup = chain(outside, around(members), _innermost(arrived))
            except CompositionError:
                return  # the transform does not allow micro-batches
            state = state.with_setup(setup)
            make_step(loss)(state, next(iter(batches(state))), _EXTRA)

        try:
            simulate(subject.size, rank)
        except GradsError:  # parts were added after ranks had communicated
            lost = None if outside is None else _lost_of_parts(arrived)
            if lost is None:
                raise
            return lost
        except TypeError as error:
            return (
                "the wrapper of a loss or value_and_grad does not take what it is called with,"
                f" (model, batch, *extras) or (state, batch, *extras, into=, sync=): {error}"
            )
        if any(given != (_EXTRA,) for given in extras):
            return "a loss was not given the step's extras: pass *extras on."
        return None if outside is None else _lost_of_parts(arrived)

    return law


_EXTRA = "an extra"
_Arrived: TypeAlias = tuple[bool, bool]
"""Whether the call had gradients to add to, and whether ranks were to communicate."""


def _innermost(arrived: list[_Arrived]) -> Any:
    """Return a transform that records how the innermost function is called."""

    @transform_of
    class innermost:
        def value_and_grad(self, inner: Any, slot: Any, update: Any) -> Any:
            def seeing(*given: Any, into: Any = None, sync: bool = True) -> Any:
                arrived.append((into is not None, sync))
                return inner(*given, into=into, sync=sync)

            return seeing, slot

    return innermost()


def _lost_of_parts(arrived: Sequence[_Arrived]) -> str | None:
    if arrived and not any(adds for adds, _ in arrived):
        return "what is to be added to was lost: pass into= on to the inner function."
    if arrived and all(sync for _, sync in arrived):
        return "every micro-batch communicated: pass sync= on to the inner function."
    return None


def _evaluates_purely(subject: Subject) -> str | None:
    """Evaluating between updates does not change the run."""

    def advance(
        states: TrainState, done: int, number: int
    ) -> Iterator[tuple[TrainState, Any]]:
        for state, metrics in subject.advance(states, done, number):
            for _ in range(2):
                eval_params(state)
                _ = state.lrs  # which asks hyper
            yield state, metrics

    again = attrs.evolve(subject, advance=advance).histories()
    runs = "a run and the same run, evaluated between updates,"
    broken = differ(subject.plain, again, runs)
    advice = " Return new tensors from eval_params. In hyper, which state.lrs asks, change nothing."
    return f"{broken}{advice}" if broken else None


def _owes_once(subject: Subject) -> str | None:
    """A second `finalize` changes nothing, and ranks hold the same parameters after it."""

    def rank(world: World) -> tuple[History, History]:
        once, again = History(), History()
        for state, _ in subject.advance(subject.start(world), 0, subject.updates):
            paid = finalize(state.copy())
            once.append(state_contents(paid, {}))
            again.append(state_contents(finalize(paid), {}))
        return once, again

    once, again = zip(*simulate(subject.size, rank, sums="ring"), strict=True)
    params = [
        [{n: e for n, e in each.items() if n.startswith("params")} for each in history]
        for history in once
    ]
    states = "what finalize returns, and finalize of that,"
    return differ(once, again, states) or differ(
        params[:1] * subject.size,
        params,
        "what finalize leaves on rank 0 and on another rank",
    )


def _merges_all(members: Sequence[Any]) -> Law:
    """Return the law that every rank's own entries have a part in the result of `merge`."""
    merging = [member for member in members if contract.has_field(member, "merge")]

    def law(subject: Subject) -> str | None:
        def rank(world: World) -> str | None:
            state = subject.start(world)
            for after, _ in subject.advance(state, 0, subject.updates):
                state = after
            for each in merging:
                own = state.slots[each.name]
                kept, lost = _shares(each, tree.clone(own), world)
                if kept:
                    return (
                        f"{each!r}.merge of {world.size} slots that it made itself, for as many"
                        f" ranks, gives another slot: {kept}"
                    )
                if lost is not None:
                    entries = list(contract.facts_of(each).get("by_rank", ()))
                    return (
                        f"{each!r}.merge gives the same, whatever rank {lost} has in {entries},"
                        " which is then lost on another number of ranks. Use every slot of the"
                        " argument."
                    )
            return None

        return next(filter(None, simulate(subject.size, rank)), None)

    return law


def _shares(transform: Any, slot: Any, world: World) -> tuple[str | None, int | None]:
    """Return how a second merge changes the result, and a rank without a part in it."""

    def merge(slots: list[Any]) -> Any:
        return transform.merge(tree.clone(slots), world)

    def named(slot: Any) -> dict[str, Any]:
        return dict(leaves("merge", slot))

    alike = [slot] * world.size
    result = merge(alike)
    again = merge([result[1]] * world.size)
    differences = NEARLY_EQUAL.by_name(named(result[1]), named(again[1]))
    kept = next((str(difference[0]) for difference in differences.values()), None)
    other = _plus_one(slot, contract.facts_of(transform).get("by_rank", ()))
    for place in range(
        world.size if first_difference(named(slot), named(other)) else 0
    ):
        changed = [*alike[:place], other, *alike[place + 1 :]]
        if world.size > 1 and not first_difference(
            named(result), named(merge(changed))
        ):
            return kept, place
    return kept, None


def _plus_one(slot: Any, names: Sequence[str]) -> Any:
    """Return a slot with 1 added to the numbers of some entries."""

    def plus(leaf: Any) -> Any:
        is_number = isinstance(leaf, (int, float, torch.Tensor))
        return leaf + 1 if is_number and not isinstance(leaf, bool) else leaf

    changed = {n: tree.tree_map(plus, each) for n, each in slot.items() if n in names}
    return {**slot, **changed}


def _loads_anywhere(subject: Subject) -> str | None:
    """A state saved on some ranks loads on more and on fewer."""
    for size in {1, subject.size + 1}:
        with tempfile.TemporaryDirectory() as folder:
            subject.save_after(2, Path(folder))
            try:
                other = attrs.evolve(subject, size=size, updates=3)
                other.resume_from(2, Path(folder))
            except Exception as error:  # noqa: BLE001 - any error breaks the law
                return (
                    f"saved on {subject.size} and resumed on {size}, the run raised"
                    f" {type(error).__name__}: {error} If ranks hold different slots, return"
                    " a weight for each and one slot for all from merge(slots)."
                )
    return None
