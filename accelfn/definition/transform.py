# SPDX-License-Identifier: Apache-2.0
"""Transforms: values that say what a step does, and `chain`, which composes them.

A transform is a frozen record of options with a method for each thing it has a say in: the
fields of the table in `accelfn.definition.fields`. It is made of a class by `@transform`;
accelfn's own are made the same way. Leftmost is outermost; values flow left to right.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from types import WrapperDescriptorType
from typing import (
    Any,
    NoReturn,
    Protocol,
    Self,
    TypeVar,
    cast,
    dataclass_transform,
)

import attrs
from attrs import NOTHING

from accelfn.base import words
from accelfn.base.calling import called
from accelfn.base.words import foreign
from accelfn.base.words.foreign import keeping
from accelfn.definition.explanation import explanation
from accelfn.definition.facts import (
    check_attributes,
    check_together,
    check_told,
    facts_of,
    told_by,
)
from accelfn.definition.fields import FIELDS, check_fields, has_field
from accelfn.definition.slots import is_slot_name
from accelfn.errors import ArgumentError, CallError, CompositionError

T = TypeVar("T")


class Trained(Protocol):
    """What a transform is applied to: a state, which says how it is trained."""

    @property
    def setup(self) -> "chain":
        """The transforms that it is trained by."""
        ...

    def with_setup(self, setup: "chain", /) -> Self:
        """Return the same, trained by others."""
        ...


State = TypeVar("State", bound=Trained)


class Transform(Protocol):
    """A frozen record that maps a state to a state; see `transform` for how to make one.

    Arguments that take one are annotated `Any`, because a type checker cannot see what
    the decorator adds to a class; they are checked when they are given.
    """

    @property
    def name(self) -> str:
        """What the transform's slot is called; unique in a chain."""
        ...

    def __call__(self, state: State) -> State:
        """Return the state with this transform added to its setup."""
        ...


def snake_case(name: str) -> str:
    """Return a class name as the words of a function name: `GradNoise` is grad_noise."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


@called
@dataclass_transform(frozen_default=True, field_specifiers=(attrs.field,))
def transform(cls: type[T]) -> type[T]:
    """Make a transform of a class whose annotations are its options.

    The class becomes a frozen attrs record: compared, hashed, pickled and printed by its
    options, the first of which may be given by position, the others by keyword. It gets a
    `name` (default: what the class sets, or its own in snake_case), which is the key of its
    slot. Its public methods are the fields of the table in `accelfn.definition.fields`; others
    start with an underscore. What it tells of itself, and what it cannot stand beside, are the
    class attributes of the table in `accelfn.definition.facts`.

    Acts on: what its methods say.

    Raises:
        ArgumentError: a public method is none of a transform's fields, or an attribute looks
            like one of a transform's that is misspelt.

    Example:
        >>> @transform
        ... class CentralizeGrads:
        ...     def grads(self, grads, slot, update):
        ...         return grads.map(lambda g: g - g.mean() if g.ndim > 1 else g), slot
        >>> CentralizeGrads()
        CentralizeGrads()
    """
    if not isinstance(cls, type):
        msg = (
            f"@af.transform: expected a class, got {cls!r}; see its docstring for one."
        )
        raise ArgumentError(msg)
    check_fields(cls)
    check_attributes(cls)
    # of a class of Python's own, which is refused below, it is a slot's
    written = vars(cls).get("__init__")
    if written is not None and not isinstance(written, WrapperDescriptorType):
        msg = (
            f"@af.transform: {cls.__name__} has an __init__ of its own, and gets one that takes"
            " its options. Leave it out, and write each option as a line of the class, such as"
            " scale: float = 1.0."
        )
        raise ArgumentError(msg)
    named = cast("Any", cls)
    try:
        named.__call__ = _apply
    except TypeError as error:  # a class of Python's own
        msg = (
            f"@af.transform: expected a class of your own, got {cls.__name__}, which cannot"
            " be changed; see its docstring for one."
        )
        raise ArgumentError(msg) from error
    named.__repr__ = _repr
    named._repr_pretty_ = _repr_pretty
    named.__accelfn_transform__ = True
    named.__add__ = named.__or__ = named.__rshift__ = _not_by_operator
    made = attrs.frozen(cls, repr=False, field_transformer=_with_name)
    changing = cast("Any", made)
    changing.__setattr__ = changing.__delattr__ = keeping(
        cls.__name__,
        "what it remembers is its slot, which `init` gives and each method returns; with"
        f" other options it is another {cls.__name__}(...)",
    )
    return called(made)


def is_transform(value: object) -> bool:
    """Return whether `value` was made by `transform`, or is a chain."""
    return getattr(type(value), "__accelfn_transform__", False)


def _not_by_operator(self: object, other: object) -> NoReturn:
    msg = f"{self!r} and {other!r}: transforms are composed by af.chain(first, second)."
    raise CallError(msg)


def _is_name(owner: object, _field: object, value: object) -> None:
    if not is_slot_name(value):
        msg = (
            f"{type(owner).__name__}(name={value!r}): expected letters, digits, "
            "'.', '_' and '-', for it names the slot in checkpoints."
        )
        raise ArgumentError(msg)


@attrs.frozen
class _Named:
    """The option that each transform gets beside its own."""

    name: str = attrs.field(default="", kw_only=True, validator=_is_name)


def _with_name(
    cls: type, fields: "list[attrs.Attribute[Any]]"
) -> "list[attrs.Attribute[Any]]":
    """Let only the first option be given by position, and add the name, which is the last.

    The class's annotations stay as they are, for to add one there would evaluate all.
    """
    options = [_by_value(field) for field in fields if field.name != "name"]
    default: Any = snake_case(cls.__name__)
    if "name" in vars(cls):  # and not in a base, which is another transform
        own = [field.default for field in fields if field.name == "name"]
        default = next((each for each in own if each is not NOTHING), default)
    name = attrs.fields(_Named).name.evolve(default=default)
    by_name = [field.evolve(kw_only=True) for field in options[1:]]
    return [*options[:1], *by_name, name]


def _by_value(field: "attrs.Attribute[Any]") -> "attrs.Attribute[Any]":
    """Let an option have lists, dicts and sets of its own, which the user's do not change.

    An option that is not compared, `attrs.field(eq=False)`, is a place for notes and is kept.
    """
    if not field.eq:
        return field
    given = [] if field.converter is None else [field.converter]
    return field.evolve(converter=attrs.converters.pipe(*given, _own))


def _own(value: Any) -> Any:
    """Return a value with containers of its own, and what is in them as it is."""
    if type(value) is dict:
        return {key: _own(each) for key, each in cast("Any", value).items()}
    if type(value) in (list, tuple, set):
        return type(value)(map(_own, value))
    return value


def _apply(self: Transform, state: State) -> State:
    """Return the state with this transform added to its setup; `state` is unchanged."""
    if not hasattr(state, "with_setup"):
        msg = f"{self!r}({state!r}): a transform is applied to a TrainState."
        raise ArgumentError(msg)
    return state.with_setup(chain(state.setup, self))


def _repr(self: Any) -> str:
    """Return the call that makes this record; options at their defaults are left out."""
    shown: list[str] = []
    for field in attrs.fields(type(self)):
        value = getattr(self, field.name)
        if field.default is not NOTHING and value == field.default:
            continue
        code = _code(value)
        shown.append(code if not field.kw_only else f"{field.name}={code}")
    owner = type(self)
    prefix = "af." if owner.__module__.startswith("accelfn.") else ""
    return f"{prefix}{owner.__name__}({', '.join(shown)})"


def _code(value: Any) -> str:
    """Return code for an option; of infinity and NaN, `repr` is none."""
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    return repr(value)


def _repr_pretty(self: Any, printer: Any, cycle: bool) -> None:  # noqa: FBT001 - its protocol
    """Print as code in IPython, and where hypothesis prints an example."""
    del cycle
    printer.text(repr(self))


@called
@foreign(words.CHAIN, changes="make another", getitem=words.CHAIN_IS_NO_LIST)
@attrs.frozen(init=False, repr=False)
class chain:
    """Compose transforms; a chain is a transform.

    Leftmost is outermost, and values flow left to right. Chains inside chains are
    flattened and None is dropped, so `chain` is associative and `chain()` its unit.
    Building one has no effect on anything.

    Law:
        `chain(f, chain(g, h)) == chain(chain(f, g), h) == chain(f, g, h)`, and
        `chain()` leaves a state as it is. Transforms about different fields commute.

    Attributes:
        transforms: leftmost first.
        owners: by field, those that have a say in it, leftmost first.
        facts: by fact, what is told of it, leftmost first.
        drawing: fields in which one may draw random numbers.
        reduces: whether one has a `reduce` of its own, which a world of one rank calls too.

    Raises:
        CompositionError: two transforms of one name, two engines, two ways to reduce
            gradients, or a pair that one of them refuses.

    Example:
        >>> import accelfn as af
        >>> af.chain(af.shard_data(), None, af.clip_grad_norm(1.0))
        af.chain(
            af.shard_data(),
            af.clip_grad_norm(1.0),
        )
    """

    __accelfn_transform__ = True
    __add__ = __or__ = __rshift__ = _not_by_operator

    transforms: tuple[Transform, ...]
    owners: Mapping[str, tuple[Any, ...]] = attrs.field(eq=False, repr=False)
    facts: Mapping[str, tuple[Any, ...]] = attrs.field(eq=False, repr=False)
    drawing: frozenset[str] = attrs.field(eq=False, repr=False)
    reduces: bool = attrs.field(eq=False, repr=False)

    def __init__(self, *transforms: Any) -> None:
        """Take transforms, leftmost outermost."""
        flat = tuple(_flatten(transforms))
        for each in flat:
            check_told(each)
        owners = {f: tuple(t for t in flat if has_field(t, f)) for f in FIELDS}
        told = {id(each): facts_of(each) for each in flat}
        # where ranks are apart, what others evaluate is brought together at the end; and what
        # runs again is what others have made of a module
        for field, fact in (("eval_params", "apart"), ("module", "recomputes")):
            owners[field] = _with_last(owners[field], fact, told)
        _check_chain(flat, owners, told)
        drawing = frozenset(
            field
            for field, having in owners.items()
            if not all(told[id(each)].get("draws_nothing") for each in having)
        )
        self.__attrs_init__(  # type: ignore[attr-defined]
            transforms=flat,
            owners=owners,
            facts=_by_fact(told[id(each)] for each in flat),
            drawing=drawing,
            reduces=any("stays" not in told[id(each)] for each in owners["reduce"]),
        )

    @property
    def name(self) -> str:
        """The name of a chain, which has no slot of its own."""
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
        """Return the laws that the transforms break on purpose, with their reasons."""
        given: dict[str, str] = {}
        for each in self.transforms:
            given.update(told_by(each, "gives_up"))
        return given

    def explain(self) -> None:
        """Print the nested calls of one step, as this chain composes them."""
        print(explanation(self.owners))  # noqa: T201 - printing is what it is for

    _repr_pretty_ = _repr_pretty

    def __repr__(self) -> str:
        """Return the code that makes the chain, one transform a line."""
        if not self.transforms:
            return "af.chain()"
        inside = "".join(f"    {each!r},\n" for each in self.transforms)
        return f"af.chain(\n{inside})"


def _flatten(transforms: tuple[object, ...]) -> Iterator[Transform]:
    for position, each in enumerate(transforms):
        if each is None:
            continue
        if isinstance(each, chain):
            yield from each.transforms
        elif is_transform(each) and not isinstance(each, type):
            yield cast("Transform", each)
        else:
            hint = ""
            if isinstance(each, type):
                hint = " Call it: transforms are values."
            elif isinstance(each, (list, tuple)):
                hint = " Compose those in it: af.chain(*transforms)."
            msg = f"chain: argument {position} is {each!r}, not a transform.{hint}"
            raise CompositionError(msg)


def _by_fact(told: Iterable[Mapping[str, Any]]) -> dict[str, tuple[Any, ...]]:
    """Return what is told of each fact."""
    found: dict[str, tuple[Any, ...]] = {}
    for facts in told:
        for fact, value in facts.items():
            found[fact] = (*found.get(fact, ()), value)
    return found


def _with_last(
    owners: tuple[Any, ...], fact: str, told: Mapping[int, Mapping[str, Any]]
) -> tuple[Any, ...]:
    """Return transforms in their order, but those that tell a fact at the end."""
    return tuple(sorted(owners, key=lambda each: fact in told[id(each)]))


def _check_chain(
    transforms: tuple[Transform, ...],
    owners: Mapping[str, tuple[Any, ...]],
    told: Mapping[int, Mapping[str, Any]],
) -> None:
    seen: dict[str, Transform] = {}
    for each in transforms:
        if each.name in seen:
            msg = (
                f"chain: {seen[each.name]!r} and {each!r} are both named {each.name!r}."
                " Drop one, or give one another name=."
            )
            raise CompositionError(msg)
        seen[each.name] = each
    compressing = tuple(t for t in transforms if "compression" in told[id(t)])
    for several, what in (
        (owners["engine"], "engines"),
        (owners["reduce"], "ways to reduce gradients"),
        (compressing, "ways to compress gradients"),
    ):
        if len(several) > 1:
            first, second, *_ = several
            msg = f"chain: two {what}, {first!r} and {second!r}. Keep one of them."
            raise CompositionError(msg)
    says: dict[int, dict[str, Any]] = {id(each): {} for each in transforms}
    for field, having in owners.items():
        for each in having:
            if getattr(each, field) is not None:  # of `reduce`: nothing is reduced
                says[id(each)][field] = field
    check_together(transforms, {key: {**say, **told[key]} for key, say in says.items()})
