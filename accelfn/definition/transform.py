# SPDX-License-Identifier: Apache-2.0
"""Transforms: immutable records that change a step, and `chain`, which composes transforms.

A transform has options and methods. Each method changes one stage of a step; the table below
lists all methods. The decorator `@transform` turns a class into a transform; accelfn's own
transforms are made in the same way. In a chain, a value passes through the transforms from
left to right. Functions are wrapped such that the leftmost transform is outermost.
"""

import copy
import difflib
import inspect
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import permutations
from typing import Any, Protocol, TypeAlias, TypeVar, cast, dataclass_transform

import attrs
import torch
from attrs import NOTHING

from accelfn.base import tree
from accelfn.base.arguments import (
    advise,
    annotations_of,
    call_mismatch,
    explain_call_errors,
    hint_attributes,
    readonly,
)
from accelfn.base.tree import is_within
from accelfn.errors import ArgumentError, CompositionError, StateError

# The methods that a transform can have (its fields), and their arguments.
#
# Most methods are `(value, slot, update) -> (value, slot)`. The value passes through the chain
# from left to right; if the value is a function, the leftmost transform wraps it last. `slot` is
# the transform's entry in `state.slots`, and `update` is a read-only
# `accelfn.state.update.Update`. Below, such a method is described by its value only.
#
# For authors of transforms:
#
# `init`: `state -> slot`, the initial entry in `state.slots`; None means no entry.
# `grads`: the gradients of the mean loss, reduced over all ranks.
# `hyper`: the hyperparameters of this update, as a dict that overrides the current values. If
#     the slot is a dict with the key `reported`, the values passed to `af.report_metric` since
#     the last update are there.
# `after_update`: the state after the optimizer step.
# `reduce`: the gradients of this rank's total; returns their sums over all ranks. May be None.
# `eval_params`: the parameters for evaluation and export.
#
# For authors of engines:
#
# `data`: `plan -> plan`, assigns samples to ranks.
# `loss`: the function `(model, batch, *extras) -> loss`; must not change the slot.
# `value_and_grad`: the function `(state, batch, *extras) -> (metrics, grads)`; must not change
#     the slot.
# `finalize`: the state at the end of training, with deferred work done.
# `merge`: `(slots, world) -> (weights, slot)`, merges the different states of ranks, for loading.
# `layout`: `(name, meta, axes) -> cuts`, for each axis the dim of the parameter to shard.
# `engine`: `state -> engine`, how the model is distributed over the ranks.
# `module`: `(module, state) -> module`, changes the engine's module, which runs the loss.


ARGUMENTS = {
    "init": ("state",),
    "grads": ("grads", "slot", "update"),
    "hyper": ("hyper", "slot", "update"),
    "after_update": ("state", "slot", "update"),
    "reduce": ("grads", "slot", "update"),
    "eval_params": ("params", "slot", "update"),
    "data": ("plan",),
    "loss": ("loss_fn", "slot", "update"),
    "value_and_grad": ("inner", "slot", "update"),
    "finalize": ("state", "slot", "update"),
    "merge": ("slots", "world"),
    "layout": ("name", "meta", "axes"),
    "engine": ("state",),
    "module": ("module", "state"),
}
"""The arguments of each method of a transform, except `self`."""
FIELDS = tuple(ARGUMENTS)
WRAPPERS = ("loss", "value_and_grad")
"""Methods that wrap a function; the leftmost transform wraps last."""


def check_fields(cls: type) -> None:
    """Raise unless all public methods of a class are methods that transforms can have.

    Raises:
        ArgumentError: a method is not in the table, or has the wrong arguments.
    """
    methods = {
        name: value
        for name, value in vars(cls).items()
        if not name.startswith("_") and inspect.isfunction(value)
    }
    for name in methods.keys() - ARGUMENTS.keys():
        matches = difflib.get_close_matches(name, FIELDS, n=1)
        hint = f" Did you mean {matches[0]!r}?" if matches else ""
        msg = (
            f"{cls.__name__}.{name} is not a method that transforms have ({', '.join(FIELDS)})."
            f"{hint} Start the names of helper methods with an underscore."
        )
        raise ArgumentError(msg)
    for name, method in methods.items():
        error = call_mismatch(method, "self", *ARGUMENTS[name])
        if error is not None:
            call = f"{name}(self, {', '.join(ARGUMENTS[name])})"
            msg = f"{cls.__name__}.{name}: accelfn calls {call}, which fails: {error}."
            raise ArgumentError(msg)


def has_field(value: Any, field: str) -> bool:
    """Return whether a transform has the method `field`.

    The attribute `without` of a transform lists the methods that its options disable.
    """
    # use the class, because `hasattr` of the object is false if a property raises
    without = value.without if hasattr(type(value), "without") else ()
    return hasattr(type(value), field) and field not in without


def check_returned(owner: object, field: str, value: object, kind: type) -> None:
    """Raise unless a transform's method returned an object of a class.

    Raises:
        ArgumentError: the object has another class; the error names the transform.
    """
    if not isinstance(value, kind):
        got, want = type(value).__name__, kind.__name__
        msg = f"{owner!r}.{field} returned {got}; expected an object of class {want}."
        raise ArgumentError(msg)


# Attributes of a transform: class attributes, or properties that depend on its options.
#
# accelfn's transforms and users' transforms use the same attributes. A transform learns about
# other transforms only through these attributes, never through their types or options.
#
# `tells`: a dict from facts of the table below to their values; a false value does not count.
# `refuses`: a dict from methods or facts to sentences. `chain` raises an error with the sentence
#     if another transform has the method or fact. `{other!r}` in the sentence is the other
#     transform, and `{told}` is the fact's value.
# `needs`: a dict from methods or facts to sentences. An error with the sentence is raised if no
#     transform of the setup has the method or fact.
# `without`: the methods that the options disable.
# `gives_up`: a dict from laws that the transform violates on purpose to the reasons.


FACTS: Mapping[str, str] = {
    "apart": "ranks have different parameters between averages. A transform with"
    " `replicas_agree` in `gives_up`, or with `reduce = None`, has this fact",
    "buckets": "DistributedDataParallel sends the gradients in its buckets",
    "by_rank": "a tuple of names: the entries of the slot that differ between ranks",
    "clips": "the maximum 2-norm of all gradients, for an engine that keeps gradients itself",
    "compiles": "a function that gets a function `module -> runner` and a state, and returns"
    " another such function, whose runner runs the loss compiled",
    "compression": "a function that gets a state, and returns how buckets are sent",
    "computes_in": "the dtype of matrix products in the loss function",
    "draws_nothing": "the methods use no random numbers, so accelfn does not seed any",
    "eight_bits": "linear layers multiply in 8 bits",
    "finds_unused": "the name of the option that allows parameters that the loss does not use",
    "judges_finite": "the transform checks the gradients, so a loss may be infinite or NaN",
    "loss_scale": "a function that gets a state, and returns the factor for losses before the"
    " backward pass. Gradients are divided by this factor",
    "micro_batches": "a function that gets a batch, and returns its micro-batches. Each"
    " micro-batch has its own backward pass",
    "offloads": "shards of parameters are in host memory, and another device computes with them",
    "one_graph": "torch.compile traces the whole loss function as one graph",
    "owes": "a function that gets a state and the transform's slot, and returns whether the"
    " ranks now have different parameters, which `finalize` makes equal",
    "recomputes": "modules run again in the backward pass",
    "sees_skips": "accelfn also calls `after_update` after a skipped update",
    "skips_alone": "the method `grads` does nothing but skip updates with infinite or NaN"
    " gradients. An engine may skip these updates itself, and not call `grads`",
    "skips_on_device": "a tensor on the device says whether the update is skipped, so accelfn"
    " always calls `after_update`",
    "small_buckets": "buckets are smaller than 1 MiB",
    "splits_layers": "a function that gets a module and a world, and splits the layers over the"
    ' ranks along "tp"',
    "splits_sequences": 'each rank along "cp" gets a part of every sequence',
    "stays": "gradients are not averaged over the copies of the model, and the copies differ. A"
    " transform with `reduce = None` has this fact",
    "steps_in_backward": "the optimizer updates parameters during the backward pass",
    "within": "the name of an axis. Gradients are averaged only along this axis",
    "whole_gradients": "each rank keeps full gradients until the last micro-batch",
}
"""The facts that a transform can declare in `tells`, and their meaning."""

ATTRIBUTES = ("tells", "refuses", "needs", "without", "gives_up")


def facts_of(transform: Any) -> dict[str, Any]:
    """Return a transform's facts: the entries of `tells`, and facts from other attributes."""
    facts = {fact: v for fact, v in told_by(transform, "tells").items() if v}
    stays = has_field(transform, "reduce") and transform.reduce is None
    if stays:
        facts["stays"] = True
    if stays or "replicas_agree" in told_by(transform, "gives_up"):
        facts["apart"] = True
    return facts


def by_rank(transforms: Iterable[Any]) -> frozenset[tuple[str, str]]:
    """Return the slot entries that differ by rank, as pairs of slot and entry name."""
    return frozenset(
        (owner.name, entry)
        for owner in transforms
        for entry in facts_of(owner).get("by_rank", ())
    )


def check_attributes(cls: type) -> None:
    """Raise if a class attribute looks like a misspelt attribute of transforms.

    Raises:
        ArgumentError: a name looks misspelt, or an option has the name of such an attribute.
    """
    annotations = annotations_of(cls).items()  # an annotation may be a string
    options = {name for name, kind in annotations if "ClassVar" not in str(kind)}
    for name in sorted(options & {*ATTRIBUTES, *FIELDS}):
        msg = (
            f"{cls.__name__}.{name}: transforms use this name, so an option cannot have it."
            " Rename the option, or annotate the attribute as ClassVar."
        )
        raise ArgumentError(msg)
    for name, value in vars(cls).items():
        plain = not name.startswith("_") and name not in options and not callable(value)
        if plain and name not in (*ATTRIBUTES, *FIELDS):
            _refuse_near(f"{cls.__name__}.{name}", name, ATTRIBUTES)


def check_told(transform: Any) -> None:
    """Raise unless `tells`, `needs`, `refuses` and `without` of a transform are valid.

    Raises:
        ArgumentError: the name of a fact or method looks misspelt, or a value has a wrong type.
    """
    code = repr(transform)
    for name in ("tells", "needs", "refuses"):
        names = (*FACTS, *FIELDS) if name != "tells" else tuple(FACTS)
        for fact, value in told_by(transform, name).items():
            if fact not in names:
                _refuse_near(f"{code}.{name}[{fact!r}]", fact, names)
            if name != "tells" and not isinstance(value, str):
                msg = f"{code}.{name}[{fact!r}] is {value!r}; expected a sentence (a string)."
                raise ArgumentError(msg)
    fields = transform.without if hasattr(type(transform), "without") else ()
    if isinstance(fields, str) or not all(field in FIELDS for field in fields):
        msg = f"{code}.without is {fields!r}; expected a tuple of some of {FIELDS}."
        raise ArgumentError(msg)
    entries = told_by(transform, "tells").get("by_rank") or ()
    if isinstance(entries, str) or not all(isinstance(entry, str) for entry in entries):
        msg = f"{code}.tells['by_rank'] is {entries!r}; expected a tuple of strings."
        raise ArgumentError(msg)


def _refuse_near(attribute: str, name: str, names: Sequence[str]) -> None:
    matches = difflib.get_close_matches(name, names, n=1, cutoff=0.85)
    if matches:
        msg = f"{attribute}: did you mean {matches[0]!r}? Known names: {', '.join(names)}."
        raise ArgumentError(msg)


def check_together(transforms: Sequence[Any]) -> None:
    """Raise if a transform of a chain rejects another transform by its `refuses`.

    Raises:
        CompositionError: the message has the sentence of the rejecting transform.
    """
    for owner, other in permutations(transforms, 2):
        # `reduce = None` means not to reduce
        says = {f: f for f in FIELDS if has_field(other, f) and getattr(other, f)}
        says |= facts_of(other)
        for name, sentence in told_by(owner, "refuses").items():
            value = says.get(name)
            if value:
                text = sentence.replace("{other!r}", "{other}")
                text = text.replace("{told}", str(value))
                msg = f"af.chain: {owner!r} {text.replace('{other}', repr(other))}"
                raise CompositionError(msg)


def check_needs(transforms: Iterable[Any], names: Collection[str]) -> None:
    """Raise if a method or fact that a transform needs is missing from the setup.

    Raises:
        CompositionError: the message has the sentence of the transform's `needs`.
    """
    for owner in transforms:
        for name, sentence in told_by(owner, "needs").items():
            if name not in names:
                msg = f"{owner!r} {sentence}"
                raise CompositionError(msg)


def told_by(transform: Any, name: str) -> Mapping[str, Any]:
    """Return a transform's attribute `name`, which must be a dict; {} if it is missing.

    Raises:
        ArgumentError: the attribute is not a dict.
    """
    # use the class, because `hasattr` of the object is false if a property raises
    value = getattr(transform, name) if hasattr(type(transform), name) else {}
    if isinstance(value, Mapping):
        return cast("Mapping[str, Any]", value)
    msg = f"{transform!r}.{name} is {value!r}; expected a dict with names as keys."
    raise ArgumentError(msg)


# A step as text: nested calls of the transforms' methods (`chain.explain`).


Owners: TypeAlias = Mapping[str, tuple[Any, ...]]


def explanation(setup: "chain") -> str:
    """Return a step as text: the nested calls of the transforms' methods."""
    owners = setup.owners
    engine, reduce = owners["engine"], owners["reduce"]
    if reduce:
        how = "not reduced" if reduce[0].reduce is None else "reduced"
        how = f"{how} over ranks: {reduce[0].name}"
    else:
        how = "averaged over ranks" if engine else "not reduced over ranks"
    loss = _nest_calls(owners, "loss", "loss_fn")
    wraps = _nest_calls(owners, "value_and_grad", f"value_and_grad({loss})")
    module = _chain_calls(owners, "module", "module")
    lies = engine[0].name if engine else "local"
    lies = "".join(f"{name} of " for name in _telling(setup, "compiles")) + lies
    lies = lies if module == "module" else f"{lies} of {module}"
    scaling = _telling(setup, "loss_scale")
    scales = "".join(f" * {name}.loss_scale" for name in scaling)
    mean = f"grads / (weight{scales})" if scales else "grads / weight"
    noting = _telling(owners["after_update"], "sees_skips")
    lines = [
        f"plan = {_chain_calls(owners, 'data', 'plan')}  # who takes which samples",
        f"metrics, grads = {wraps}(state, batch)",
        f"# engine: {lies}; gradients {how}",
        f"grads = {_chain_calls(owners, 'grads', mean)}",
        *(
            f"# after a skipped update, only this runs: {n}.after_update"
            for n in noting
        ),
        f"hyper = {_chain_calls(owners, 'hyper', 'schedule(state.step)')}",
        "state = optimizer(state, grads, hyper)",
        f"state = {_chain_calls(owners, 'after_update', 'state')}",
    ]
    body = [line for line in lines if line != "state = state"]
    return "\n    ".join(["step(state, batch):", *body])


def _telling(transforms: Iterable[Any], fact: str) -> list[str]:
    """Return the names of the transforms that have a fact."""
    return [owner.name for owner in transforms if fact in facts_of(owner)]


def _nest_calls(owners: Owners, field: str, inner: str) -> str:
    """Return nested calls of a method as text, with the leftmost transform outermost."""
    calls = [f"{owner.name}.{field}(" for owner in owners[field]]
    return "".join(calls) + inner + ")" * len(calls)


def _chain_calls(owners: Owners, field: str, value: str) -> str:
    """Return nested calls of a method as text, with the leftmost transform innermost."""
    for owner in owners[field]:
        value = f"{owner.name}.{field}({value})"
    return value


# Slots: the entries in a state of its transforms and of the user.


def is_slot_name(name: object) -> bool:
    """Return whether a name is valid for a slot, also as part of a file name."""
    return isinstance(name, str) and bool(re.fullmatch(r"[A-Za-z0-9_.-]+", name))


def check_own_name(name: str, setup: Collection[str]) -> None:
    """Raise unless a user's entry can have this name.

    Raises:
        StateError: the name is invalid, or the name of a transform in the setup.
    """
    if not is_slot_name(name):
        msg = f"state.with_slot({name!r}, ...): use only letters, digits, '.', '_' and '-'."
        raise StateError(msg)
    if name in setup:
        msg = (
            f"state.with_slot({name!r}, ...): this slot belongs to the transform {name!r}. Use"
            " another name. The transform can read your entry as update.state.slots[name]."
        )
        raise StateError(msg)


def carried_over(
    slots: Mapping[str, Any], old: Collection[str], new: Collection[str]
) -> dict[str, Any]:
    """Return the slots without the slots of removed transforms.

    Args:
        slots: the slots of transforms, and the user's entries.
        old: the names of the transforms in the old setup.
        new: the names of the transforms in the new setup.

    Raises:
        StateError: a new transform has the name of a user's entry.
    """
    joining, leaving = set(new) - set(old), set(old) - set(new)
    if clashes := sorted(joining & slots.keys()):
        msg = (
            f"The new transforms {', '.join(clashes)} have the names of entries that"
            " state.with_slot created. Pass another name= to each of these transforms."
        )
        raise StateError(msg)
    return {name: slot for name, slot in slots.items() if name not in leaving}


def say_what_follows(name: str, slot: Any, state: Any) -> None:
    """Warn if a user's entry contains the state's own tensors instead of copies."""
    if _follows(slot, state):
        advise(
            f"state.with_slot({name!r}, ...) got tensors of the state itself, so the next updates"
            " will also change this entry. To keep the present values, pass copies, such as"
            " {name: p.clone() for name, p in state.params.items()}."
        )


def check_copied(
    owner: Any, slot: Any, state: Any, *grads: Mapping[str, torch.Tensor]
) -> None:
    """Raise if the slot of a transform contains tensors that updates change in place.

    Args:
        owner: the transform.
        slot: the slot that the transform returned.
        state: the state with the parameters, buffers and optimizer state.
        grads: gradients of the update.

    Raises:
        StateError: the slot contains such a tensor.
    """
    names = state.definition.skeleton.trainable
    sources: list[tuple[str, Mapping[str, Any]]] = [
        ("state.params", {name: state.params[name] for name in names}),
        ("state.buffers", state.buffers),
        ("state.opt_state", state.opt_state),
        *(("grads.tensors", grad) for grad in grads),
    ]
    for path, tensors in sources:
        if _follows(slot, tensors):
            name = next(n for n, tensor in tensors.items() if _follows(slot, tensor))
            msg = (
                f"{owner!r} returned a slot that contains {path}[{name!r}] itself, not a copy."
                " The next updates would change this tensor. Return copies, such as"
                f" {{name: value.clone() for name, value in {path}.items()}}."
            )
            raise StateError(msg)


def _follows(slot: Any, state: Any) -> bool:
    is_held = is_within(tree.tensor_leaves(state))
    return any(map(is_held, _tensors(slot)))


def _tensors(slot: Any, depth: int = 4) -> Iterator[torch.Tensor]:
    if isinstance(slot, torch.Tensor):
        yield slot
    elif depth and isinstance(slot, (Mapping, list, tuple)):
        inside = cast("Any", slot.values() if isinstance(slot, Mapping) else slot)
        for item in inside:
            yield from _tensors(item, depth - 1)


def own_objects(slot: Any) -> Any:
    """Return a slot with the same tensors, and copies of all other objects."""
    return tree.tree_map(
        lambda leaf: leaf if isinstance(leaf, torch.Tensor) else copy.deepcopy(leaf),
        slot,
    )


T = TypeVar("T")
State = TypeVar("State")
"""The TrainState that a transform is applied to."""


class Transform(Protocol):
    """The type of transforms: immutable records that can be called with a state.

    The decorator `transform` creates such classes. Parameters for transforms are annotated as
    `Any`, because type checkers cannot see what the decorator adds. accelfn checks these
    arguments at the call.
    """

    @property
    def name(self) -> str:
        """The name of the transform's slot; unique in a chain."""
        ...

    def __call__(self, state: State) -> State:
        """Return the state with this transform added to its setup."""
        ...


@explain_call_errors
@dataclass_transform(frozen_default=True, field_specifiers=(attrs.field,))
def transform(cls: type[T]) -> type[T]:
    """Turn a class into a transform; the annotated attributes of the class are its options.

    The class becomes a frozen attrs class: its objects are compared, hashed, pickled and printed
    by their options. You can pass the first option by position, and the others by keyword. The
    decorator adds the option `name`, the name of the transform's slot. Its default is the
    attribute `name` of the class, or the class name in snake_case. Public methods must be
    methods of the table in `accelfn.definition.transform`. Class attributes such as `needs` tell
    other transforms about this transform. Start the names of helper methods with an underscore.

    Acts on: the stages of a step for which the class has methods.

    Raises:
        ArgumentError: transforms have no method with the name of a public method, or an
            attribute looks misspelt.

    Example:
        >>> @transform
        ... class CentralizeGrads:
        ...     def grads(self, grads, slot, update):
        ...         return grads.map(lambda g: g - g.mean() if g.ndim > 1 else g), slot
        >>> CentralizeGrads()
        CentralizeGrads()
    """
    if not isinstance(cls, type):
        msg = f"@af.transform: expected a class, got {cls!r}."
        raise ArgumentError(msg)
    check_fields(cls)
    check_attributes(cls)
    if inspect.isfunction(vars(cls).get("__init__")):
        msg = (
            f"@af.transform: {cls.__name__} must not define __init__. Write each"
            " option as a line of the class, such as scale: float = 1.0."
        )
        raise ArgumentError(msg)
    named: Any = cls
    try:
        named.__call__ = _apply
    except TypeError as error:  # a built-in class, which is immutable
        msg = f"@af.transform: expected a class of your own, got {cls.__name__}."
        raise ArgumentError(msg) from error
    named.__repr__ = _repr
    named._repr_pretty_ = _Pretty()
    named.__accelfn_transform__ = True
    record: Any = attrs.frozen(cls, repr=False, field_transformer=_with_name)
    record.__init__.__annotations__ |= {  # attrs would use the annotation of the converter
        field.name: field.type
        for field in attrs.fields(record)
        if field.converter is _copy_containers and field.type is not None
    }
    record.__setattr__ = record.__delattr__ = readonly(
        cls.__name__,
        f"for other options, create another {cls.__name__}(...). Keep changing values in its"
        " slot, which `init` and the other methods return",
    )
    return explain_call_errors(record)


def is_transform(value: object) -> bool:
    """Return whether `value` was made by `transform`, or is a chain."""
    return getattr(type(value), "__accelfn_transform__", False)


def _is_name(owner: object, _field: object, value: object) -> None:
    if not is_slot_name(value):
        msg = (
            f"{type(owner).__name__}(name={value!r}): expected letters, digits, '.', '_' and"
            " '-', because the name is also the name of the slot in checkpoints."
        )
        raise ArgumentError(msg)


@attrs.frozen
class _Named:
    """The option `name`, which the decorator adds to every transform."""

    name: str = attrs.field(default="", kw_only=True, validator=_is_name)


def _with_name(
    cls: type, fields: "list[attrs.Attribute[Any]]"
) -> "list[attrs.Attribute[Any]]":
    """Make all options but the first keyword-only, and append the option `name`.

    The annotations of the class are not changed: adding one would evaluate all.
    """
    options = [_by_value(field) for field in fields if field.name != "name"]
    default: Any = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", cls.__name__).lower()
    # a base class is another transform, so its name does not count
    if "name" in vars(cls):
        defaults = [field.default for field in fields if field.name == "name"]
        default = next((value for value in defaults if value is not NOTHING), default)
    name = attrs.fields(_Named).name.evolve(default=default)
    by_name = [field.evolve(kw_only=True) for field in options[1:]]
    return [*options[:1], *by_name, name]


def _by_value(field: "attrs.Attribute[Any]") -> "attrs.Attribute[Any]":
    """Make an option copy lists, dicts and sets, so that later changes do not affect it.

    An option that is not compared, `attrs.field(eq=False)`, is not copied.
    """
    if not field.eq:
        return field
    converter: Any = _copy_containers
    if field.converter is not None:
        converter = attrs.converters.pipe(field.converter, converter)
    return field.evolve(converter=converter)


def _copy_containers(value: Any) -> Any:
    """Copy the dicts, lists, tuples and sets in a value, but not the objects inside."""
    if type(value) is dict:
        return {key: _copy_containers(item) for key, item in cast("Any", value).items()}
    if type(value) in (list, tuple, set):
        return type(value)(map(_copy_containers, value))
    return value


def _apply(self: Transform, state: State) -> State:
    """Return the state with this transform added to its setup; `state` is unchanged."""
    train_state: Any = state
    if not hasattr(train_state, "with_setup"):
        kind = type(state).__name__
        msg = f"A setup takes a TrainState, got {kind}: write TrainState.create(setup=setup)."
        raise ArgumentError(msg)
    return train_state.with_setup(chain(train_state.setup, self))


def _repr(self: Any) -> str:
    """Return the call that creates this transform, without options that have their default."""
    options: list[str] = []
    owner = type(self)
    for field in attrs.fields(owner):
        value = getattr(self, field.name)
        if field.default is NOTHING or value != field.default:
            keyword = f"{field.name}=" if field.kw_only else ""
            options.append(keyword + _code(value))
    prefix = "af." if owner.__module__.startswith("accelfn.") else ""
    return f"{prefix}{owner.__name__}({', '.join(options)})"


def _code(value: Any) -> str:
    """Return an option's value as code; the `repr` of infinity and NaN would not be code."""
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    return repr(value)


class _Pretty:
    """Prints a transform as code, and a class of transforms by its name.

    IPython calls `_repr_pretty_` on the class, and Hypothesis on what it prints, also a class.
    """

    def __get__(self, instance: Any, owner: type) -> Any:
        def print_name(*arguments: Any) -> None:
            *instances, printer, _ = arguments
            transform = instances[0] if instances else instance
            printer.text(owner.__name__ if transform is None else repr(transform))

        return print_name


@explain_call_errors
@hint_attributes("setattr", "getitem")
@attrs.frozen(init=False, repr=False)
class chain:
    """Compose transforms; the result is also a transform.

    A value, such as the gradients, passes through the transforms from left to right. Functions
    are wrapped such that the leftmost transform is outermost. Chains inside chains are
    flattened, and None is ignored.

    Law:
        `chain(f, chain(g, h)) == chain(chain(f, g), h) == chain(f, g, h)`, and
        `chain()` does not change a state. The order of transforms with different methods does
        not matter.

    Attributes:
        transforms: the transforms, leftmost first.
        owners: for each method, the transforms that have it, leftmost first.
        facts: for each fact, its values in the transforms that have it, leftmost first.
        drawing: the methods that may use random numbers.
        reduces: whether a transform defines `reduce`. A world of one rank also calls it.

    Raises:
        CompositionError: two transforms have the same name, two are engines or reduce
            gradients, or a transform rejects another transform.

    Example:
        >>> import accelfn as af
        >>> af.chain(af.shard_data(), None, af.clip_grad_norm(1.0))
        af.chain(
            af.shard_data(),
            af.clip_grad_norm(1.0),
        )
    """

    __accelfn_transform__ = True

    transforms: tuple[Transform, ...]
    owners: Mapping[str, tuple[Any, ...]] = attrs.field(eq=False, repr=False)
    facts: Mapping[str, tuple[Any, ...]] = attrs.field(eq=False, repr=False)
    drawing: frozenset[str] = attrs.field(eq=False, repr=False)
    reduces: bool = attrs.field(eq=False, repr=False)

    def __init__(self, *transforms: Any) -> None:
        """Create a chain of transforms, chains and None, leftmost first."""
        flat = tuple(_flatten(transforms))
        for entry in flat:
            check_told(entry)
        owners = {f: tuple(t for t in flat if has_field(t, f)) for f in FIELDS}
        # two exceptions to the order: parameters for evaluation are merged over ranks last, and
        # recomputation wraps the module after all other transforms have changed the module
        for field, fact in (("eval_params", "apart"), ("module", "recomputes")):
            owners[field] = _with_last(owners[field], fact)
        _check_chain(flat, owners)
        facts: dict[str, tuple[Any, ...]] = {}
        for owner in flat:
            for fact, value in facts_of(owner).items():
                facts[fact] = (*facts.get(fact, ()), value)
        drawing = frozenset(
            field
            for field, having in owners.items()
            if not all("draws_nothing" in facts_of(owner) for owner in having)
        )
        self.__attrs_init__(  # type: ignore[attr-defined]
            transforms=flat,
            owners=owners,
            facts=facts,
            drawing=drawing,
            reduces=any("stays" not in facts_of(owner) for owner in owners["reduce"]),
        )

    @property
    def name(self) -> str:
        """The name "chain"; a chain has no slot."""
        return "chain"

    def __call__(self, state: State) -> State:
        """Return the state with these transforms added to its setup, in order."""
        return _apply(self, state) if self.transforms else state

    def __iter__(self) -> Iterator[Transform]:
        """Iterate over the transforms, leftmost first."""
        return iter(self.transforms)

    def __len__(self) -> int:
        """Return how many transforms there are."""
        return len(self.transforms)

    def gives_up(self) -> dict[str, str]:
        """Return the laws that the transforms violate on purpose, with the reasons."""
        every = (told_by(owner, "gives_up") for owner in self.transforms)
        return {law: reason for reasons in every for law, reason in reasons.items()}

    def explain(self) -> None:
        """Print the nested calls of the transforms' methods in one step."""
        print(explanation(self))  # noqa: T201 - printing is the purpose of this method

    _repr_pretty_ = _Pretty()

    def __repr__(self) -> str:
        """Return the code that creates the chain, with one transform per line."""
        if not self.transforms:
            return "af.chain()"
        inside = "".join(f"    {owner!r},\n" for owner in self.transforms)
        return f"af.chain(\n{inside})"


def _flatten(transforms: tuple[object, ...]) -> Iterator[Transform]:
    for position, owner in enumerate(transforms):
        if owner is None:
            continue
        if isinstance(owner, chain):
            yield from owner.transforms
        elif is_transform(owner) and not isinstance(owner, type):
            yield cast("Transform", owner)
        else:
            hint = f" Write {owner.__name__}(...)." if isinstance(owner, type) else ""
            if isinstance(owner, (list, tuple)):
                hint = " Write setup=af.chain(*transforms)."
            msg = f"af.chain: argument {position} is {owner!r}, not a transform.{hint}"
            raise CompositionError(msg)


def _with_last(owners: tuple[Any, ...], fact: str) -> tuple[Any, ...]:
    """Return transforms in order, but with the transforms that have a fact at the end."""
    return tuple(sorted(owners, key=lambda owner: fact in facts_of(owner)))


def _check_chain(transforms: tuple[Transform, ...], owners: Owners) -> None:
    by_name: dict[str, Transform] = {}
    for owner in transforms:
        if owner.name in by_name:
            msg = (
                f"af.chain: {by_name[owner.name]!r} and {owner!r} are both named {owner.name!r}."
                " Remove one of them, or pass another name= to it."
            )
            raise CompositionError(msg)
        by_name[owner.name] = owner
    compressing = tuple(t for t in transforms if "compression" in facts_of(t))
    for several, noun in (
        (owners["engine"], "engines"),
        (owners["reduce"], "ways to reduce gradients"),
        (compressing, "ways to compress gradients"),
    ):
        if len(several) > 1:
            first, second, *_ = several
            msg = f"af.chain: two {noun}: {first!r} and {second!r}. Keep one of them."
            raise CompositionError(msg)
    check_together(transforms)
