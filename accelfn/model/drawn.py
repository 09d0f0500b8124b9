# SPDX-License-Identifier: Apache-2.0
"""A model drawn module by module, so that nobody ever holds it whole.

The factory is run with its parameters on meta. Then a module's own parameters are made, drawn
by its `reset_parameters`, handed to who keeps a part of them, and let go, before the next
one's are. Each module draws from a generator of its own name: what it draws depends on nothing
that was drawn before.
"""

import math
import sys
from collections import defaultdict
from collections.abc import (
    Callable,
    Collection,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn, TypeAlias, cast

import attrs
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from accelfn.base import draws
from accelfn.base.arguments import call_mismatch
from accelfn.errors import ModelError
from accelfn.model.model import (
    ModelSource,
    check_factory,
    check_module,
    check_values,
    parameters_on_meta,
)

# pyright: reportPrivateUsage=false

# What a function did to tensors without values: by which operations, with which numbers.
#
# A factory that is run with its parameters on meta leaves no values to look at. But what it
# did to each tells how it would have set them: whether as the module's own
# `reset_parameters` does, or otherwise, as one that loads a file, or writes zeros into a
# layer's weight.


Act: TypeAlias = tuple[Any, ...]
"""An operation, and the numbers that it was given."""

# torch has no public word for where a tensor's memory is, if it has none

_aten: Any = torch.ops.aten
_EMPTY = {
    _aten.empty.memory_format,
    _aten.empty_like.default,
    _aten.empty_strided.default,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
}
_PAD = _aten.constant_pad_nd.default  # Transformers pads tied biases, by nothing mostly
_COPIES = {_aten.clone.default, _aten._to_copy.default}
_IS_META = cast("Any", torch.Tensor.is_meta).__get__
_VALUES = "<values>"
_FULL = "<full of>"
_CAST = 1e-2  # a number may have gone from one dtype to another


@contextmanager
def record_operations() -> Generator["OperationRecord"]:
    """Give what notes all that is done to tensors on meta inside a `with` block."""
    acts = OperationRecord()
    with _Looks(acts), acts:
        yield acts


class OperationRecord(TorchDispatchMode):
    """Notes which operations write into tensors on meta.

    A tensor is known by its memory, which views of it share. What is known stays alive, so
    that no other gets its place: on meta that costs nothing, and elsewhere it is memory that
    nobody has written to.
    """

    def __init__(self) -> None:
        """Begin with nothing noted."""
        super().__init__()
        self._acts: dict[int, list[Act]] = {}
        self._unwritten: set[int] = set()
        self._alive: dict[int, torch.UntypedStorage] = {}

    def on(self, tensor: torch.Tensor) -> tuple[Act, ...]:
        """Return what was done to a tensor, in order."""
        return tuple(self._acts.get(_memory(tensor), ()))

    def begins(self, given: nn.Parameter, param: nn.Parameter) -> None:
        """Note with which values a parameter came, before it went to meta."""
        place = _memory(given)
        begun: list[Act] = []
        if place not in self._unwritten and given.numel():
            plain = given.detach()
            first = plain.reshape(-1)[0]
            same = bool((plain == first).all())
            begun = [(_FULL, first.item()) if same else (_VALUES,)]
        self._forget(place)
        self._note(param, begun)

    def leaves(self, tensor: torch.Tensor, act: Act) -> None:
        """Note what would have been done to a tensor, were it not on meta."""
        self._note(tensor, [*self.on(tensor), act])

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Do it, and note it."""
        kwargs = kwargs or {}
        returned = func(*args, **kwargs)
        act = (str(func), *_numbers(args), *_numbers(kwargs.values()))
        given = list(_tensors([args, kwargs]))
        for tensor in _written_tensors(func, args, kwargs):
            if tensor.is_meta:
                self.leaves(tensor, act)
            else:
                self._forget(_memory(tensor))
        known = {_memory(tensor) for tensor in given}
        for tensor in _tensors([returned]):
            if _memory(tensor) not in known:
                self._note_new(func, act, given, tensor)
        return returned

    def _note_new(
        self, func: Any, act: Act, given: Sequence[torch.Tensor], made: torch.Tensor
    ) -> None:
        copied = func in _COPIES or (func == _PAD and made.shape == given[0].shape)
        if func in _EMPTY or (copied and _memory(given[0]) in self._unwritten):
            self._note(made, [])
            if not made.is_meta:
                self._unwritten.add(_memory(made))
        elif made.is_meta:
            self._note(made, list(self.on(given[0])) if copied else [act])

    def _note(self, tensor: torch.Tensor, acts: list[Act]) -> None:
        storage = tensor.untyped_storage()
        self._alive[storage._cdata], self._acts[storage._cdata] = storage, acts

    def _forget(self, place: int) -> None:
        self._unwritten.discard(place)
        self._acts.pop(place, None)
        self._alive.pop(place, None)


class _Looks(TorchFunctionMode):
    """Notes which functions of torch.nn.init leave a tensor as it is, since it is on meta.

    `trunc_normal_`, `orthogonal_`, `dirac_` and `sparse_` do: that they look is all there is.
    """

    def __init__(self, acts: OperationRecord) -> None:
        super().__init__()
        self._acts = acts

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Do it, and look who asks."""
        if func == _IS_META and args[0].is_meta:
            asking = sys._getframe(1)
            code = asking.f_code
            if asking.f_globals is vars(nn.init):
                taken = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
                numbers = _numbers(asking.f_locals[name] for name in taken)
                self._acts.leaves(args[0], (code.co_name, *numbers))
        return func(*args, **(kwargs or {}))


def sets_alike(setting: Sequence[Act], made: Sequence[Act]) -> bool:
    """Whether one who did this to a parameter leaves it as its factory did.

    It does if the factory did nothing, or the same in the end. What is copied from values
    that are there, as from a file, is not known by an operation and its numbers: where the
    factory copied more often, it was from elsewhere.
    """
    if not setting or not made or is_full(made):
        return bool(setting)
    copies = [act for act in setting if _VALUES in act]
    return list(made[-len(setting) :]) == list(setting) and all(
        made.count(act) == setting.count(act) for act in copies
    )


def is_full(made: Sequence[Act]) -> bool:
    """Whether a parameter came with one number everywhere, and nothing was done to it."""
    return len(made) == 1 and made[0][0] == _FULL


def is_as_made(tensor: torch.Tensor, made: Sequence[Act]) -> bool:
    """Whether values are those with which a parameter came, as far as these are known."""
    if not is_full(made) or tensor.is_complex():
        return True
    ends = (float(end) for end in tensor.aminmax())
    return all(math.isclose(end, made[0][1], rel_tol=_CAST) for end in ends)


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            if value.layout is torch.strided:
                yield value
        elif isinstance(value, Mapping):
            yield from _tensors(value.values())
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _written_tensors(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[torch.Tensor]:
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            at_place = args[place] if place < len(args) else None
            yield from _tensors([kwargs.get(argument.name, at_place)])


def _numbers(values: Iterable[Any]) -> Iterator[Any]:
    """Give what tells one call of an operation from another; values in tensors do not."""
    for value in values:
        if isinstance(value, torch.Tensor):
            if not value.is_meta:
                yield value.item() if value.ndim == 0 else _VALUES
        elif isinstance(value, (list, tuple)):
            yield from _numbers(value)
        elif not isinstance(value, (torch.device, torch.Generator)):
            yield value


# torch has no public word for a module's own parameters, without those inside it

Keep: TypeAlias = Callable[[str, torch.Tensor], torch.Tensor]
_Ways: TypeAlias = list[tuple[str, Callable[[], object]]]
_CPU = torch.device("cpu")
_WHOLE = 'or init="whole", which draws the model as its factory does, on each rank'


@attrs.frozen(eq=False)
class MetaModel:
    """A model whose parameters have no values.

    Attributes:
        module: its parameters are on meta, its buffers are not.
        acts: by a parameter's name, what the factory did to it.
        places: by a parameter's name, the modules that have it, and under which name each.
    """

    module: nn.Module
    acts: Mapping[str, tuple[Act, ...]]
    places: Mapping[str, list[tuple[nn.Module, str]]]

    def put(self, params: Mapping[str, torch.Tensor]) -> None:
        """Let the module have other parameters under some names."""
        for name, param in params.items():
            for module, own in self.places[name]:
                module._parameters[own] = cast("nn.Parameter", param)


def build_on_meta(source: ModelSource, *, seed: int, name: str) -> MetaModel:
    """Return the model of a factory, its parameters on meta.

    Raises:
        ModelError: it is no factory, or one that needs values of parameters, or gives some
            that were there before; or no state could be made of the model.
    """
    if isinstance(source, nn.Module):
        msg = (
            f'TrainState.create(model={type(source).__name__}(...), init="shard"): the model'
            " is there already, and whole. Give a factory, which is called here, such as"
            f' functools.partial({type(source).__name__}, ...), or write init="whole".'
        )
        raise ModelError(msg)
    check_factory(source)
    with draws.seeded(draws.key(seed, name, "init"), _CPU):
        try:
            with record_operations() as acts, parameters_on_meta(acts.begins):
                module = source()
        except (RuntimeError, TypeError, NotImplementedError) as error:
            if not _is_of_meta(error):
                raise
            msg = (
                f'TrainState.create(init="shard"): the factory {source!r} asks for values of'
                f" parameters, which have none while it runs: {error}. Write"
                f" reset_parameters() for what sets them, {_WHOLE}."
            )
            raise ModelError(msg) from error
    check_module(module, source)
    check_values(module, drawn=False)
    for own, param in module.named_parameters():
        if not param.is_meta:
            msg = (
                f'TrainState.create(init="shard"): {own!r} of {type(module).__name__} has'
                " values from before the factory ran, or is a copy of such. Let the factory"
                ' make all modules anew, or write init="whole".'
            )
            raise ModelError(msg)
    params = dict(module.named_parameters())
    return MetaModel(
        module, {n: acts.on(p) for n, p in params.items()}, _places(module)
    )


def draw_params(
    bare: MetaModel, keep: Keep, *, seed: int, name: str
) -> dict[str, torch.Tensor]:
    """Return what is kept of each parameter, in the module's order.

    Modules inside come before those around them. A parameter is drawn by the module that it
    is in, or, if that one would not set it as the factory did, by the nearest one around it
    that does: as attention sets the bias of a layer in it.

    Args:
        bare: the model; it is left without values.
        keep: a function of a parameter's name and values; it gives what is kept of them.
        seed: of the draws.
        name: of the state.

    Raises:
        ModelError: nothing sets a parameter, or not as the factory did.
    """
    kept: dict[str, torch.Tensor] = {}
    own: dict[int, list[str]] = defaultdict(list)
    for each, places in bare.places.items():
        own[id(places[0][0])].append(each)
    drawing = _Drawing(bare, keep, kept, {}, own)
    for where, module in reversed(list(bare.module.named_modules())):
        drawing.come_to(module)
        for said, way in _initializers(bare.module, where, module):
            due = drawing.due(where)
            if not due:
                break
            key = draws.key(seed, name, "init", where)
            try:
                drawing.by(way, said, due, key)
            except (RuntimeError, TypeError, NotImplementedError) as error:
                if not _is_of_meta(error):
                    raise
                msg = (
                    f'TrainState.create(init="shard"): {said} asks for values that are not'
                    f" there while it draws: {error}. Let it set parameters of its own"
                    f" module alone, {_WHOLE}."
                )
                raise ModelError(msg) from error
    for lacking, why in drawing.pending.items():
        _refuse(bare, lacking, why, len(drawing.pending))
    return {n: kept[n] for n, _ in bare.module.named_parameters()}


@attrs.frozen(eq=False)
class _Drawing:
    """How far it is: what is kept already, and why other parameters are not drawn yet.

    Attributes:
        own: by a module's id, the names of the parameters that are its own.
    """

    bare: MetaModel
    keep: Keep
    kept: dict[str, torch.Tensor]
    pending: dict[str, str]
    own: Mapping[int, list[str]]

    def come_to(self, module: nn.Module) -> None:
        """Let a module's own parameters be drawn from now on."""
        self.pending.update(dict.fromkeys(self.own.get(id(module), ()), ""))

    def due(self, where: str) -> list[str]:
        """Return the names of what is still to be drawn in a module."""
        begin = f"{where}." if where else ""
        return [name for name in self.pending if name.startswith(begin)]

    def by(
        self, way: Callable[[], object], said: str, due: Collection[str], key: int
    ) -> None:
        """Draw what a function sets as the factory did."""
        metas = {name: _at(self.bare.places[name][0]) for name in due}
        with draws.seeded(key, _CPU), torch.no_grad(), record_operations() as acts:
            way()
        setting = {name: acts.on(meta) for name, meta in metas.items()}
        for name in due:
            if setting[name] or not self.pending[name]:
                self.pending[name] = _why(said, setting[name])
        alike = {
            name: metas[name]
            for name in due
            if sets_alike(setting[name], self.bare.acts[name])
            or not metas[name].numel()
        }
        if not alike:
            return
        whole = {name: _unset(meta) for name, meta in alike.items()}
        with self._placed(whole, alike), draws.seeded(key, _CPU), torch.no_grad():
            way()
        for name in alike:
            values = whole.pop(name).detach()
            if _is_unset(values):
                self.pending[name] = f"{said} leaves unset, or without a number"
            elif is_as_made(values, self.bare.acts[name]):
                del self.pending[name]
                self.kept[name] = self.keep(name, values)

    @contextmanager
    def _placed(
        self, params: Mapping[str, torch.Tensor], metas: Mapping[str, torch.Tensor]
    ) -> Generator[None]:
        self.bare.put(params)
        try:
            yield
        finally:
            self.bare.put(metas)


def _initializers(root: nn.Module, where: str, module: nn.Module) -> _Ways:
    """Return what may set a module's parameters, Transformers' way before torch's."""
    kind, ways = type(module).__name__, cast("_Ways", [])
    for around in _enclosing_modules(root, where):
        convention: Any = getattr(around, "_init_weights", None)
        if callable(convention) and call_mismatch(convention, module) is None:
            said = f"{type(around).__name__}._init_weights({kind})"
            ways.append((said, partial(convention, module)))
            break
    for name in (
        "reset_parameters",
        "_reset_parameters",
    ):  # attention's has the other name
        own: Any = getattr(module, name, None)
        if callable(own) and call_mismatch(own) is None:
            ways.append((f"{kind}.{name}()", own))
    return ways


def _enclosing_modules(root: nn.Module, where: str) -> Iterator[nn.Module]:
    """Give a module and those around it, from the inside."""
    names = where.split(".") if where else []
    for count in range(len(names), -1, -1):
        yield root.get_submodule(".".join(names[:count]))


def _places(module: nn.Module) -> dict[str, list[tuple[nn.Module, str]]]:
    names = {id(param): name for name, param in module.named_parameters()}
    places: dict[str, list[tuple[nn.Module, str]]] = defaultdict(list)
    for each in module.modules():
        for own, param in each._parameters.items():
            if param is not None:
                places[names[id(param)]].append((each, own))
    return dict(places)


def _at(place: tuple[nn.Module, str]) -> nn.Parameter:
    module, own = place
    return cast("nn.Parameter", module._parameters[own])


def _unset(meta: torch.Tensor) -> nn.Parameter:
    """Return a parameter none of whose elements has a number, if its dtype knows such."""
    values = torch.empty_like(meta, device="cpu").detach()
    has_nan = values.is_floating_point() or values.is_complex()
    values.fill_(torch.nan if has_nan else 0)
    return nn.Parameter(values, requires_grad=meta.requires_grad)


def _is_unset(values: torch.Tensor) -> bool:
    """Whether an element has no number; no tensor of as many elements is made for it."""
    plain = torch.view_as_real(values) if values.is_complex() else values
    if not plain.is_floating_point() or not plain.numel():
        return False
    plain = plain.float() if plain.dtype.itemsize == 1 else plain
    return bool(plain.min().isnan())


def _is_of_meta(error: BaseException) -> bool:
    said = str(error).lower()
    return "meta" in said or "incompatible tensor type" in said


def _why(said: str, setting: Collection[Act]) -> str:
    if not setting:
        return f"{said} leaves unset, or without a number"
    return f"the factory set otherwise than {said}, as by loading it"


def _refuse(bare: MetaModel, name: str, why: str, count: int) -> NoReturn:
    module, own = bare.places[name][0]
    kind, where = type(module).__name__, name.rpartition(".")[0]
    here = f"the module {where!r}, a {kind}," if where else f"the model, a {kind},"
    more = f" ({count - 1} more parameters are like it.)" if count > 1 else ""
    reason = why or f"nothing sets, for {kind} has no reset_parameters()"
    theirs = type(module).__module__.startswith("torch.")
    setter = "the module around it" if theirs else kind
    msg = (
        f'TrainState.create(init="shard"): {here} has a parameter {own!r} which {reason}.'
        f"{more} Give {setter} a method reset_parameters() that sets it, and which __init__"
        f" calls, {_WHOLE}."
    )
    raise ModelError(msg)
