# SPDX-License-Identifier: Apache-2.0
"""Laws about single methods of a transform, each held where a transform has the method."""

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
    batches,
    chain,
    eval_params,
    finalize,
    make_step,
    reduce,
)
from accelfn import transform as transform_of
from accelfn.definition.transform import facts_of, has_field
from accelfn.errors import CompositionError, GradsError
from accelfn.model.optimizer import Hyper
from accelfn.plug import tree
from accelfn.state.grads import GradInfo
from accelfn.state.update import apply_transforms, override_hyper
from accelfn.testing.comparing import (
    Comparison,
    copy_leaf,
    entries,
    first_difference,
    leaves,
)
from accelfn.testing.laws import History, Law, Subject, differ, state_contents
from accelfn.testing.simulate import simulate

# A transform watched at work: which of its inputs its methods change.


Seen: TypeAlias = Callable[[str], None]
"""Is told of each input that was changed."""

_IN_PLACE = frozenset({"after_update", "finalize"})
"""Methods that are given the state's tensors, to be changed in place."""


_NEW = "Return new tensors instead."


def watch_inputs(transform: Any, seen: Seen) -> Any:
    """Return an equal transform that tells of inputs it changes and must not.

    A method may change in place its own slot and the gradients it is given, and after an
    update the tensors of the state; never the state before it, other slots, or a batch.
    `observe` may not even change its own slot: the state that was given to it still has it.
    """

    def watch(field: str, own: str, function: Any, *given: Any, **named: Any) -> Any:
        keep = _copy_inputs(given, own=own, field=field)
        returned = function(*given, **named)
        for name in keep():
            seen(f"{transform!r}.{field} changed {name} in place. {_NEW}")
        return returned

    def call(field: str, method: Any, self: Any, *given: Any) -> Any:
        if field != "observe":
            return watch(field, self.name, partial(method, self), *given)
        _, slot, _ = given
        path = f"slots[{self.name!r}]"
        before = {name: copy_leaf(leaf) for name, leaf in leaves(path, slot)}
        returned = watch(field, "", partial(method, self), *given)
        if changed := first_difference(before, dict(leaves(path, slot))):
            seen(
                f"{transform!r}.observe changed its own slot in place: {changed}. {_NEW}"
            )
        return returned

    def wrap(field: str, method: Any, self: Any, inner: Callable[..., Any]) -> Any:
        return wraps(inner)(partial(watch, field, "", method(self, inner)))

    return intercept(intercept(transform, _METHODS, call), _WRAPPERS, wrap)


def with_methods(transform: Any, methods: Mapping[str, Any]) -> Any:
    """Return a transform of the same options and name, with other methods, or facts."""
    kind = type(transform)
    body = {"__slots__": (), "__module__": kind.__module__, **methods}
    made = object.__new__(type(kind.__name__, (kind,), body))
    for field in attrs.fields(kind):
        object.__setattr__(made, field.name, getattr(transform, field.name))
    return made


def intercept(transform: Any, fields: Iterable[str], call: Callable[..., Any]) -> Any:
    """Return an equal transform, for whose methods `call(field, method, self, ...)` is called."""
    kind = type(transform)

    def method_of(field: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def called(self: Any, *given: Any) -> Any:
            return call(field, method, self, *given)

        return called

    methods = {field: getattr(kind, field, None) for field in fields}
    found = {field: method_of(field, m) for field, m in methods.items() if callable(m)}
    return with_methods(transform, found)


_METHODS = (
    *("init", "grads", "loss_scale", "hyper", "after_update"),
    *("observe", "reduce", "eval_params", "finalize"),
)
_WRAPPERS = ("loss", "value_and_grad")


def _copy_inputs(
    given: Iterable[Any], *, own: str, field: str
) -> Callable[[], list[str]]:
    """Copy what must not change; return what says, later, what did."""
    tensors: dict[str, torch.Tensor] = {}
    for each in given:
        tensors.update(_protected_tensors(each, own=own, field=field))
    copies = {name: tensor.detach().clone() for name, tensor in tensors.items()}

    def changed() -> list[str]:
        return [
            name
            for name, copy in copies.items()
            if not _same(copy, tensors[name].detach())
        ]

    return changed


def _protected_tensors(value: Any, *, own: str, field: str) -> dict[str, torch.Tensor]:
    """Return the tensors of one argument that the method must leave alone, by name."""
    if isinstance(value, TrainState):
        return _of_state(value, own=own, all_but_slots=field not in _IN_PLACE)
    if isinstance(value, Update):
        if field in _IN_PLACE:  # the state before has given its tensors away
            return _of_slots(value.slots, own)
        state = value.state
        return _of_state(state, own=own, all_but_slots=True)
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
        parts |= {f"buffers[{name!r}]": each for name, each in state.buffers.items()}
        entries = state.opt_state.items()
        parts |= {f"opt_state[{name!r}]": dict(entry) for name, entry in entries}
    return _of_slots(state.slots, own) | _tensors(parts)


def _of_slots(slots: Mapping[str, Any], own: str) -> dict[str, torch.Tensor]:
    return _tensors({f"slots[{n!r}]": slot for n, slot in slots.items() if n != own})


def _tensors(parts: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for name, part in parts.items():
        leaves = tree.tensor_leaves(part)
        found |= {f"{name} ({i})" if i else name: t for i, t in enumerate(leaves)}
    return found


def _same(one: torch.Tensor, two: torch.Tensor) -> bool:
    return one.shape == two.shape and torch.equal(
        one.nan_to_num() if one.is_floating_point() else one,
        two.nan_to_num() if two.is_floating_point() else two,
    )


# Whether a transform's own `reduce` gives the mean over all ranks: no more, and no less.


Tensors = Mapping[str, torch.Tensor]
_Reduced: TypeAlias = tuple[Mapping[str, Any], Mapping[str, Any], Mapping[str, Any]]

NEAR = 0.05
"""How far, of its own size, what came of a gradient may be from the mean: bytes may be few."""
_LABEL = "reduces_to_mean"
_ROUNDS, _IN_SUM = 200, 0.02
"""In so many updates after the first, all of its gradients is sent, but for this part."""
_LARGE, _LITTLE = 10.0, 0.01
"""How large gradients are at first, and then."""


def watch_mean(transform: Any, seen: Seen) -> Any:
    """Return an equal transform that tells of what its `reduce` makes of gradients."""

    def call(
        _: str, method: Any, self: Any, grads: Grads, slot: Any, update: Update
    ) -> Any:
        wanted = _mean(grads, update.world)
        returned = method(self, grads, slot, update)
        found: Grads = returned[0]
        missing = sorted(wanted.keys() - found.tensors.keys())
        if missing:
            seen(f"in update {update.num_tried} it leaves out {missing[0]!r}")
        for name in wanted.keys() & found.tensors.keys():
            mean = found.tensors[name].double() / found.taken.scale
            size, off = wanted[name].norm(), (mean - wanted[name]).norm()
            if not off <= NEAR * size:
                seen(
                    f"in update {update.num_tried}, rank {update.world.rank}, the gradient of"
                    f" {name!r} is off by {float(off / size):.2g} times the size of the mean"
                    " over all ranks, each by its weight"
                )
        return returned

    return intercept(transform, ["reduce"], call)


def sends_all(members: Sequence[Any]) -> Law:
    """Return the law that what an update leaves out is sent later, though ranks join or leave."""
    merging = [each for each in members if has_field(each, "merge")]

    def law(subject: Subject) -> str | None:
        def begins(world: World) -> _Reduced:
            return _sum_reduced(subject.start(world), range(1), _LARGE)

        def goes_on(world: World) -> _Reduced:
            state, saved = subject.start(world), [slots for *_, slots in begun]
            slots = {} if merging else {**saved[world.rank]}
            for each in merging:
                own = tree.clone([slots_of[each.name] for slots_of in saved])
                slots[each.name] = each.merge(own, world)[1]
            state = attrs.evolve(state, slots={**state.slots, **slots})
            return _sum_reduced(state, range(1, 1 + _ROUNDS), _LITTLE)

        begun = simulate(subject.size, begins)
        size = (1 if subject.size > 1 else 2) if merging else subject.size
        sums, means, _ = zip(begun[0], simulate(size, goes_on)[0], strict=True)
        wanted = {name: means[0][name] + means[1][name] for name in means[0]}
        missing = [sums[0][name] + sums[1][name] - wanted[name] for name in wanted]
        off = float(get_total_norm(missing) / get_total_norm([*wanted.values()]))
        if off <= _IN_SUM:
            return None
        moved = f", the last {_ROUNDS} of them on {size}" if merging else ""
        return (
            f"over {1 + _ROUNDS} updates{moved}, what reduce gives is in sum off by"
            f" {off:.2g} times the weighted mean's. Send later all that an update leaves out,"
            " in merge share it out among the new ranks, or name it:"
            ' gives_up = {"sends_all_later": "it is a vote"}.'
        )

    return law


def _sum_reduced(state: TrainState, steps: range, size: float) -> _Reduced:
    """Return the sums of what `reduce` gives, those of the means, and the slots after it."""
    world = state.world
    generator = torch.Generator().manual_seed(world.rank)
    # other weights on each rank, of the same sum on any number of ranks
    weight = 20.0 * (world.rank + 1) / (world.size * (world.size + 1))
    totals = {
        name: size * weight * torch.randn(state.params[name].shape, generator=generator)
        for name in state.trainable
    }
    grads = Grads(tensors=totals, taken=GradInfo(divisor=weight, shows_totals=True))
    update = Update(state=state, slots=state.slots, grads=grads)
    sums = dict.fromkeys(totals, 0.0)
    for step in steps:
        at = attrs.evolve(update, state=attrs.evolve(state, step=step))
        found, update = apply_transforms("reduce", grads.map(torch.clone), at, Grads)
        for name, each in found.tensors.items():
            sums[name] = sums[name] + each.double() / found.taken.scale
    means = {name: mean * len(steps) for name, mean in _mean(grads, world).items()}
    return sums, means, tree.clone(dict(update.slots))


def _mean(grads: Grads, world: World) -> Tensors:
    """Return the mean over all ranks, by weight."""
    weight = torch.as_tensor(grads.weight, dtype=torch.float64)
    totals = {name: grad.double() for name, grad in grads.tensors.items()}
    sums, whole = reduce((totals, weight), world, label=_LABEL)
    return {name: each / whole for name, each in sums.items()}


_NEAR = Comparison(rtol=1e-4, atol=1e-6)
"""What numbers that are added up and divided may differ by."""
Around: TypeAlias = Callable[[Sequence[Any]], chain]
"""Returns the whole setup around some transforms."""


def method_laws(members: Sequence[Any], around: Around) -> dict[str, Law]:
    """Return, by name, the laws about methods that some transforms have."""

    def have(*fields: str) -> bool:
        return any(has_field(each, field) for each in members for field in fields)

    def told_by(watch: Callable[[Any, Seen], Any]) -> Law:
        """Return the law that nothing is told in a run of watched transforms."""

        def law(subject: Subject) -> str | None:
            seen: list[str] = []
            # begun in this setup, so that init is watched, too
            subject.within(around([watch(m, seen.append) for m in members])).histories()
            return seen[0] if seen else None

        return law

    given_up = chain(*members).gives_up()
    laws: dict[str, tuple[tuple[str, ...], Law]] = {
        "inputs_unchanged": ((), told_by(watch_inputs)),
        "own_slot": ((), _own_slot(members, around)),
        "drops_nothing": ((), told_by(_watch_losses)),
        "skips_whole": ((), _skips_whole(members, around)),
        "reduces_to_mean": (("reduce",), told_by(watch_mean)),
        "groups_apart": (("hyper",), told_by(_watch_groups)),
        "takes_what_it_is_given": (("grads", "eval_params"), told_by(_watch_flow)),
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
    """It adds its own slot and no other, keeps it, and leaves the state's numbers alone."""

    def law(subject: Subject) -> str | None:
        setup = around(members).transforms
        names = {each.name for each in setup}
        expected = {each.name for each in setup if has_field(each, "init")}

        def rank(world: World) -> str | None:
            state = subject.start(world)
            made = {name for name in expected if state.slots.get(name) is not None}
            dtypes = _dtypes(state.slots)
            for after, _ in subject.advance(state, 0, 1):
                state = after
            others = sorted(set(state.slots) - names)
            if others:
                return f"it made the slots {others}, not its own."
            lost = sorted(name for name in made if state.slots.get(name) is None)
            if lost:
                return (
                    f"the slot {lost[0]!r}, which init made, was None after an update."
                    " Return the slot that was given, or the next one."
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
    """Return an equal transform that tells of gradients, parameters and numbers it loses."""

    def call(field: str, method: Any, self: Any, value: Any, *given: Any) -> Any:
        returned = method(self, value, *given)
        if told := _LOST[field](value, returned):
            seen(f"{self!r}.{field} {told}")
        return returned

    return intercept(transform, _LOST, call)


def _lost_gradient(grads: Grads, returned: tuple[Grads, Any]) -> str | None:
    lost = sorted(grads.tensors.keys() - returned[0].tensors.keys())
    if not lost:
        return None
    return (
        f"drops the gradient of {lost[0]!r}, which is not trained then. Give zeros, or"
        " freeze it: state.with_trainable."
    )


def _lost_parameter(
    params: Mapping[str, Any], returned: tuple[Mapping[str, Any], Any]
) -> str | None:
    lost = sorted(params.keys() - returned[0].keys())
    return f"leaves out the parameter {lost[0]!r}." if lost else None


def _changed_number(state: TrainState, returned: tuple[TrainState, Any]) -> str | None:
    for name in _NUMBERS:
        if getattr(returned[0], name) != getattr(state, name):
            return f"changes state.{name}, which is the step's own to move."
    return None


def _watch_groups(transform: Any, seen: Seen) -> Any:
    """Return an equal transform that tells where a group's numbers depend on another group's."""

    def call(
        _: str, method: Any, self: Any, hyper: Hyper, slot: Any, update: Update
    ) -> Any:
        moved = {n: e * 2 if n == (0, "lr") else e for n, e in hyper.items()}
        with torch.random.fork_rng(devices=[]):  # both draw the same numbers
            other = method(self, MappingProxyType(moved), tree.clone(slot), update)
        returned = method(self, hyper, slot, update)
        groups = update.state.definition.optimizer.param_groups
        one, two = (
            override_hyper(groups, {}, returned[0]),
            override_hyper(groups, {}, other[0]),
        )
        if any(n[0] and one.get(n) != two.get(n) for n in {**one, **two}):
            seen(
                f"{self!r}.hyper gives parameter group 1 other numbers if group 0 was given"
                " another learning rate. Set each group's by its own: {(group, name):"
                " value}."
            )
        return returned

    return intercept(transform, ["hyper"], call)


def _watch_flow(transform: Any, seen: Seen) -> Any:
    """Return an equal transform that tells where it takes its update's value instead."""

    def call(field: str, method: Any, self: Any, value: Any, *given: Any) -> Any:
        slot, update = given

        def result(by: int, at: Update) -> Any:
            with torch.random.fork_rng(devices=[]):  # all draw the same numbers
                returned, _ = method(
                    self, _change_numbers(value, by), tree.clone(slot), at
                )
            return dict(getattr(returned, "tensors", returned))

        both = result(2, _with_value(update, _change_numbers(value, 2)))
        plain, only = result(1, update), result(2, update)
        if first_difference(only, both) and not first_difference(plain, only):
            seen(
                f"{self!r}.{field} takes what its update has, not its first argument, and so"
                " undoes transforms to its left. Work on what it is given."
            )
        return method(self, value, slot, update)

    return intercept(transform, ["grads", "eval_params"], call)


def _change_numbers(value: Any, by: int) -> Any:
    """Return a copy of gradients or parameters, with other numbers unless `by` is 1."""

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
    """A skipped update leaves parameters, optimizer and slots as they were."""
    # what is observed between updates moves slots, too
    is_moved = any(
        "sees_skips" in facts_of(each) or has_field(each, "observe") for each in members
    )
    parts = ("params", "opt_state", *(() if is_moved else ("slots",)))

    def law(subject: Subject) -> str | None:
        def rank(world: World) -> str | None:
            try:
                tried = subject.within(around([*members, skips_often()]))
            except CompositionError:
                return None  # it goes with no skips
            states = tried.advance(tried.start(world), 0, subject.updates)
            broken, skipped, kept = None, 0, dict[str, Any]()
            for state, _ in islice(states, subject.updates + 3):
                found = entries(state, gather=True).items()
                after = {n: e for n, e in found if n.startswith(parts)}
                if kept and state.num_skipped > skipped:
                    broken = broken or first_difference(kept, after)
                skipped, kept = state.num_skipped, after
            return broken

        broken = next(filter(None, simulate(subject.size, rank)), None)
        if not broken:
            return None
        return (
            f"an update that another transform skipped changed {broken} Before after_update,"
            " return a new slot, and leave the one that was given as it is; in after_update,"
            " ask update.skipped."
        )

    return law


@transform_of
class skips_once:
    """Wishes to skip the second update: for transforms that have a say in what is skipped."""

    def grads(self, grads: Grads, slot: None, update: Update) -> tuple[Grads, None]:
        """Wish it on all ranks."""
        return grads.with_skip(update.num_tried == 1, agreed=True), slot


@transform_of
class skips_often:
    """Wishes to skip updates among twos and threes that are taken, and no two in a row."""

    def grads(self, grads: Grads, slot: None, update: Update) -> tuple[Grads, None]:
        """Wish it on all ranks."""
        return grads.with_skip(update.num_tried % 5 in (1, 4), agreed=True), slot


def _passes_on(members: Sequence[Any], around: Around) -> Law:
    """What wraps a loss or a gradient passes on extras, `into=` and `sync=`."""
    splits = any(has_field(each, "data") for each in members)
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
                return  # it goes with no micro-batches
            state = state.with_setup(setup)
            make_step(loss)(state, next(iter(batches(state))), _EXTRA)

        try:
            simulate(subject.size, rank)
        except GradsError:  # what was to be added came of ranks that had communicated
            lost = None if outside is None else _lost_of_parts(arrived)
            if lost is None:
                raise
            return lost
        except TypeError as error:
            return (
                "what wraps a loss or value_and_grad does not take what it is called with,"
                f" (model, batch, *extras) or (state, batch, *extras, into=, sync=): {error}"
            )
        if any(given != (_EXTRA,) for given in extras):
            return "a loss was not given the step's extras: pass *extras on."
        return None if outside is None else _lost_of_parts(arrived)

    return law


_EXTRA = "an extra"
_Arrived: TypeAlias = tuple[bool, bool]
"""Whether there was something to add to, and whether ranks were to communicate."""


def _innermost(arrived: list[_Arrived]) -> Any:
    """Return a transform that sees how the innermost function is called."""

    @transform_of
    class innermost:
        def value_and_grad(self, inner: Any) -> Any:
            def seeing(*given: Any, into: Any = None, sync: bool = True) -> Any:
                arrived.append((into is not None, sync))
                return inner(*given, into=into, sync=sync)

            return seeing

    return innermost()


def _lost_of_parts(arrived: Sequence[_Arrived]) -> str | None:
    if arrived and not any(adds for adds, _ in arrived):
        return "what is to be added to was lost: pass into= on to the inner function."
    if arrived and all(sync for _, sync in arrived):
        return "every micro-batch communicated: pass sync= on to the inner function."
    return None


def _evaluates_purely(subject: Subject) -> str | None:
    """Evaluating between updates changes nothing of the run."""

    def advance(
        states: TrainState, done: int, number: int
    ) -> Iterator[tuple[TrainState, Any]]:
        for state, metrics in subject.advance(states, done, number):
            for _ in range(2):
                eval_params(state)
                _ = state.lrs  # which asks hyper
            yield state, metrics

    again = attrs.evolve(subject, advance=advance).histories()
    said = "a run and the same run, evaluated between updates,"
    broken = differ(subject.plain, again, said)
    advice = " Return new tensors from eval_params. In hyper, which state.lrs asks, change nothing."
    return f"{broken}{advice}" if broken else None


def _owes_once(subject: Subject) -> str | None:
    """What is owed is owed once, after any update: `finalize` again changes nothing.

    And ranks that trained independently hold the same parameters then.
    """

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
    said = "what finalize returns, and finalize of that,"
    return differ(once, again, said) or differ(
        params[:1] * subject.size,
        params,
        "what finalize leaves on rank 0 and on another rank",
    )


def _merges_all(members: Sequence[Any]) -> Law:
    """What any rank remembers for itself has its share in what `merge` returns, and no more."""
    merging = [each for each in members if has_field(each, "merge")]

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
                        f" ranks, gives another one: {kept}"
                    )
                if lost is not None:
                    return (
                        f"{each!r}.merge gives the same, whatever rank {lost} has in"
                        f" {list(facts_of(each).get('by_rank', ()))}: that is lost on another"
                        " number of ranks."
                    )
            return None

        return next(filter(None, simulate(subject.size, rank)), None)

    return law


def _shares(transform: Any, slot: Any, world: World) -> tuple[str | None, int | None]:
    """Return how merging again changes what is merged, and which rank has no say in it."""

    def merged(slots: list[Any]) -> Any:
        return transform.merge(tree.clone(slots), world)

    def named(slot: Any) -> dict[str, Any]:
        return dict(leaves("merge", slot))

    alike = [slot] * world.size
    found = merged(alike)
    differences = _NEAR.by_name(
        named(found[1]), named(merged([found[1]] * world.size)[1])
    )
    kept = next((str(each[0]) for each in differences.values()), None)
    other = _plus_one(slot, facts_of(transform).get("by_rank", ()))
    for place in range(
        world.size if first_difference(named(slot), named(other)) else 0
    ):
        moved = [*alike[:place], other, *alike[place + 1 :]]
        if world.size > 1 and not first_difference(named(found), named(merged(moved))):
            return kept, place
    return kept, None


def _plus_one(slot: Any, names: Sequence[str]) -> Any:
    """Return a slot with other numbers in some of its entries."""

    def plus(leaf: Any) -> Any:
        is_number = isinstance(leaf, (int, float, torch.Tensor))
        return leaf + 1 if is_number and not isinstance(leaf, bool) else leaf

    moved = {n: tree.tree_map(plus, each) for n, each in slot.items() if n in names}
    return {**slot, **moved}


def _loads_anywhere(subject: Subject) -> str | None:
    """Saved on some ranks, it is loaded on more and on fewer, with the same places in it."""
    for size in {1, subject.size + 1}:
        with tempfile.TemporaryDirectory() as folder:
            subject.saved(2, Path(folder))
            try:
                other = attrs.evolve(subject, size=size, updates=3)
                other.resumed(2, Path(folder))
            except Exception as error:  # noqa: BLE001 - whatever it is, its own ranks had none
                return (
                    f"saved on {subject.size} and gone on with on {size}, the run raised"
                    f" {type(error).__name__}: {error} Where ranks hold slots that differ,"
                    " merge(slots) returns a weight for each, and one slot for all."
                )
    return None
