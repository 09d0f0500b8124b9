# SPDX-License-Identifier: Apache-2.0
"""Draw a model module by module, so that no rank ever holds the full model.

The factory runs with its parameters on the meta device. Then accelfn creates the parameters of
one module, draws them by its `reset_parameters`, keeps the shards, and frees the parameters
before the next module. Each module draws from a generator with the module's name, so its values
do not depend on earlier draws.
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

# Operations on tensors without values, with their numbers.
#
# A factory that runs with its parameters on the meta device leaves no values. The operations on
# each parameter show how the factory would set it: as the module's `reset_parameters` does, or
# otherwise, for example from a file.


Act: TypeAlias = tuple[Any, ...]
"""An operation, and its numeric arguments."""

# torch has no public function for the identity of a storage without memory

_aten: Any = torch.ops.aten
_EMPTY = {
    _aten.empty.memory_format,
    _aten.empty_like.default,
    _aten.empty_strided.default,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
}
_PAD = _aten.constant_pad_nd.default  # Transformers pads tied biases, mostly by 0 rows
_COPIES = {_aten.clone.default, _aten._to_copy.default}
_IS_META = cast("Any", torch.Tensor.is_meta).__get__
_VALUES = "<values>"
_FULL = "<full of>"
_CAST = 1e-2  # a conversion between dtypes may have rounded a number


@contextmanager
def record_operations() -> Generator["OperationRecord"]:
    """Record all operations on meta tensors inside of a `with` block."""
    acts = OperationRecord()
    with _Looks(acts), acts:
        yield acts


class OperationRecord(TorchDispatchMode):
    """Records the operations that write into meta tensors.

    The storage identifies a tensor, because views share it. Recorded storages stay alive, so
    that no other tensor gets the same identity. On the meta device this costs no memory.
    """

    def __init__(self) -> None:
        """Create an empty record."""
        super().__init__()
        self._acts: dict[int, list[Act]] = {}
        self._unwritten: set[int] = set()
        self._alive: dict[int, torch.UntypedStorage] = {}

    def on(self, tensor: torch.Tensor) -> tuple[Act, ...]:
        """Return the operations on a tensor, in order."""
        return tuple(self._acts.get(_memory(tensor), ()))

    def begins(self, original: nn.Parameter, param: nn.Parameter) -> None:
        """Record the initial values of a parameter before it moves to the meta device."""
        place = _memory(original)
        acts: list[Act] = []
        if place not in self._unwritten and original.numel():
            plain = original.detach()
            first = plain.reshape(-1)[0]
            same = bool((plain == first).all())
            acts = [(_FULL, first.item()) if same else (_VALUES,)]
        self._forget(place)
        self._note(param, acts)

    def leaves(self, tensor: torch.Tensor, act: Act) -> None:
        """Record an operation that skipped a tensor because it is on the meta device."""
        self._note(tensor, [*self.on(tensor), act])

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Call the operation, and record it."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        act = (str(func), *_numbers(args), *_numbers(kwargs.values()))
        inputs = list(_tensors([args, kwargs]))
        for tensor in _written_tensors(func, args, kwargs):
            if tensor.is_meta:
                self.leaves(tensor, act)
            else:
                self._forget(_memory(tensor))
        places = {_memory(tensor) for tensor in inputs}
        for tensor in _tensors([result]):
            if _memory(tensor) not in places:
                self._note_new(func, act, inputs, tensor)
        return result

    def _note_new(
        self, func: Any, act: Act, inputs: Sequence[torch.Tensor], output: torch.Tensor
    ) -> None:
        is_copy = func in _COPIES or (func == _PAD and output.shape == inputs[0].shape)
        if func in _EMPTY or (is_copy and _memory(inputs[0]) in self._unwritten):
            self._note(output, [])
            if not output.is_meta:
                self._unwritten.add(_memory(output))
        elif output.is_meta:
            self._note(output, list(self.on(inputs[0])) if is_copy else [act])

    def _note(self, tensor: torch.Tensor, acts: list[Act]) -> None:
        storage = tensor.untyped_storage()
        self._alive[storage._cdata], self._acts[storage._cdata] = storage, acts

    def _forget(self, place: int) -> None:
        self._unwritten.discard(place)
        self._acts.pop(place, None)
        self._alive.pop(place, None)


class _Looks(TorchFunctionMode):
    """Records the functions of torch.nn.init that skip meta tensors.

    `trunc_normal_`, `orthogonal_`, `dirac_` and `sparse_` skip them, and only read `is_meta`.
    """

    def __init__(self, acts: OperationRecord) -> None:
        super().__init__()
        self._acts = acts

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Call the function, and record a reader of `is_meta`."""
        if func == _IS_META and args[0].is_meta:
            asking = sys._getframe(1)
            code = asking.f_code
            if asking.f_globals is vars(nn.init):
                names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
                numbers = _numbers(asking.f_locals[name] for name in names)
                self._acts.leaves(args[0], (code.co_name, *numbers))
        return func(*args, **(kwargs or {}))


def sets_alike(setting: Sequence[Act], acts: Sequence[Act]) -> bool:
    """Return whether an initializer sets a parameter as its factory did.

    It does if the factory did nothing, or ended with the same operations. Copies of existing
    values, as from a file, do not show their source. If the factory copied more often, it
    copied from elsewhere.
    """
    if not setting or not acts or is_full(acts):
        return bool(setting)
    copies = [act for act in setting if _VALUES in act]
    return list(acts[-len(setting) :]) == list(setting) and all(
        acts.count(act) == setting.count(act) for act in copies
    )


def is_full(acts: Sequence[Act]) -> bool:
    """Return whether a parameter began with one number everywhere, without operations."""
    return len(acts) == 1 and acts[0][0] == _FULL


def is_as_made(tensor: torch.Tensor, acts: Sequence[Act]) -> bool:
    """Return whether values equal a parameter's initial values, as far as these are known."""
    if not is_full(acts) or tensor.is_complex():
        return True
    ends = (float(end) for end in tensor.aminmax())
    return all(math.isclose(end, acts[0][1], rel_tol=_CAST) for end in ends)


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
    """Yield the numeric arguments of an operation, without values in tensors."""
    for value in values:
        if isinstance(value, torch.Tensor):
            if not value.is_meta:
                yield value.item() if value.ndim == 0 else _VALUES
        elif isinstance(value, (list, tuple)):
            yield from _numbers(value)
        elif not isinstance(value, (torch.device, torch.Generator)):
            yield value


# torch has no public access to a module's own parameters without those of its submodules

Keep: TypeAlias = Callable[[str, torch.Tensor], torch.Tensor]
_Ways: TypeAlias = list[tuple[str, Callable[[], object]]]
_CPU = torch.device("cpu")
_WHOLE = 'or init="whole", which draws the model as its factory does, on each rank'


@attrs.frozen(eq=False)
class MetaModel:
    """A model whose parameters have no values.

    Attributes:
        module: the module with parameters on the meta device, and real buffers.
        acts: by parameter name, the operations of the factory.
        places: by parameter name, the modules with the parameter, and its name in each.
    """

    module: nn.Module
    acts: Mapping[str, tuple[Act, ...]]
    places: Mapping[str, list[tuple[nn.Module, str]]]

    def put(self, params: Mapping[str, torch.Tensor]) -> None:
        """Replace parameters of the module by name."""
        for name, param in params.items():
            for module, key in self.places[name]:
                module._parameters[key] = cast("nn.Parameter", param)


def build_on_meta(source: ModelSource, *, seed: int, name: str) -> MetaModel:
    """Return the model of a factory, with its parameters on the meta device.

    Raises:
        ModelError: the source is not a factory, needs values of parameters, or returns earlier
            parameters; or the model cannot be trained.
    """
    if isinstance(source, nn.Module):
        msg = (
            f'TrainState.create(model={type(source).__name__}(...), init="shard"): the model'
            " is there already, and whole. Give a factory, such as"
            f' functools.partial({type(source).__name__}, ...), or write init="whole".'
        )
        raise ModelError(msg)
    check_factory(source)
    with draws.seeded(draws.key(seed, name, "init"), _CPU):
        asks = (
            f"the factory {source!r} asks for values of parameters, which have none yet"
        )
        advice = "Write reset_parameters() for what sets them"
        with (
            _explain_meta(asks, advice),
            record_operations() as acts,
            parameters_on_meta(acts.begins),
        ):
            module = source()
    check_module(module, source)
    check_values(module, full=False)
    for path, param in module.named_parameters():
        if not param.is_meta:
            msg = (
                f'TrainState.create(init="shard"): {path!r} of {type(module).__name__} has'
                " values from before the factory ran, or is a copy of such. Let the factory"
                ' make all modules anew, or write init="whole".'
            )
            raise ModelError(msg)
    params = dict(module.named_parameters())
    return MetaModel(
        module, {n: acts.on(p) for n, p in params.items()}, _places(module)
    )


def draw_params(
    model: MetaModel, keep: Keep, *, seed: int, name: str
) -> dict[str, torch.Tensor]:
    """Return the kept part of each parameter, in the module's order.

    Submodules come before the modules around them. The module of a parameter draws it. If that
    module would not set it as the factory did, the nearest enclosing module draws it, as
    attention sets the bias of its layer.

    Args:
        model: the model; it stays without values.
        keep: a function of a parameter's name and values that returns the part to keep.
        seed: the seed of the draws.
        name: the name of the state.

    Raises:
        ModelError: no initializer sets a parameter as the factory did.
    """
    params: dict[str, torch.Tensor] = {}
    names_of: dict[int, list[str]] = defaultdict(list)
    for key, places in model.places.items():
        names_of[id(places[0][0])].append(key)
    drawing = _Drawing(model, keep, params, {})
    for where, module in reversed(list(model.module.named_modules())):
        drawing.pending.update(dict.fromkeys(names_of.get(id(module), ()), ""))
        for call, init in _initializers(model.module, where, module):
            due = drawing.due(where)
            if not due:
                break
            asks = f"{call} asks for values that are not there while it draws"
            with _explain_meta(asks, "Let it set parameters of its own module alone"):
                drawing.by(init, call, due, draws.key(seed, name, "init", where))
    for lacking, why in drawing.pending.items():
        _refuse(model, lacking, why, len(drawing.pending))
    return {n: params[n] for n, _ in model.module.named_parameters()}


@attrs.frozen(eq=False)
class _Drawing:
    """The progress: the kept parts, and why other parameters are not drawn yet."""

    bare: MetaModel
    keep: Keep
    kept: dict[str, torch.Tensor]
    pending: dict[str, str]

    def due(self, where: str) -> list[str]:
        """Return the names of the undrawn parameters in a module."""
        begin = f"{where}." if where else ""
        return [name for name in self.pending if name.startswith(begin)]

    def by(
        self, init: Callable[[], object], call: str, due: Collection[str], key: int
    ) -> None:
        """Draw the parameters that a function sets as the factory did."""
        metas = {name: _at(self.bare.places[name][0]) for name in due}
        with draws.seeded(key, _CPU), torch.no_grad(), record_operations() as acts:
            init()
        setting = {name: acts.on(meta) for name, meta in metas.items()}
        for name in due:
            if setting[name] or not self.pending[name]:
                self.pending[name] = _why(call, setting[name])
        matches = {
            name: metas[name]
            for name in due
            if sets_alike(setting[name], self.bare.acts[name])
            or not metas[name].numel()
        }
        if not matches:
            return
        blanks = {name: _unset(meta) for name, meta in matches.items()}
        with (
            self._place_params(blanks, matches),
            draws.seeded(key, _CPU),
            torch.no_grad(),
        ):
            init()
        for name in matches:
            values = blanks.pop(name).detach()
            if _is_unset(values):
                self.pending[name] = f"{call} leaves unset, or without a number"
            elif is_as_made(values, self.bare.acts[name]):
                del self.pending[name]
                self.kept[name] = self.keep(name, values)

    @contextmanager
    def _place_params(
        self, params: Mapping[str, torch.Tensor], metas: Mapping[str, torch.Tensor]
    ) -> Generator[None]:
        self.bare.put(params)
        try:
            yield
        finally:
            self.bare.put(metas)


def _initializers(root: nn.Module, where: str, module: nn.Module) -> _Ways:
    """Return a module's initializers, Transformers' before torch's."""
    kind, inits = type(module).__name__, cast("_Ways", [])
    for parent in _enclosing_modules(root, where):
        convention: Any = getattr(parent, "_init_weights", None)
        if callable(convention) and call_mismatch(convention, module) is None:
            call = f"{type(parent).__name__}._init_weights({kind})"
            inits.append((call, partial(convention, module)))
            break
    # attention's has the other name
    for name in ("reset_parameters", "_reset_parameters"):
        method: Any = getattr(module, name, None)
        if callable(method) and call_mismatch(method) is None:
            inits.append((f"{kind}.{name}()", method))
    return inits


def _enclosing_modules(root: nn.Module, where: str) -> Iterator[nn.Module]:
    """Yield a module and its enclosing modules, from the inside."""
    names = where.split(".") if where else []
    for count in range(len(names), -1, -1):
        yield root.get_submodule(".".join(names[:count]))


def _places(module: nn.Module) -> dict[str, list[tuple[nn.Module, str]]]:
    names = {id(param): name for name, param in module.named_parameters()}
    places: dict[str, list[tuple[nn.Module, str]]] = defaultdict(list)
    for submodule in module.modules():
        for key, param in submodule._parameters.items():
            if param is not None:
                places[names[id(param)]].append((submodule, key))
    return dict(places)


def _at(place: tuple[nn.Module, str]) -> nn.Parameter:
    module, key = place
    return cast("nn.Parameter", module._parameters[key])


def _unset(meta: torch.Tensor) -> nn.Parameter:
    """Return a parameter of NaN, or of 0 if its dtype has no NaN."""
    values = torch.empty_like(meta, device="cpu").detach()
    has_nan = values.is_floating_point() or values.is_complex()
    values.fill_(torch.nan if has_nan else 0)
    return nn.Parameter(values, requires_grad=meta.requires_grad)


def _is_unset(values: torch.Tensor) -> bool:
    """Return whether an element is NaN, without a tensor of the same size."""
    plain = torch.view_as_real(values) if values.is_complex() else values
    if not plain.is_floating_point() or not plain.numel():
        return False
    plain = plain.float() if plain.dtype.itemsize == 1 else plain
    return bool(plain.min().isnan())


@contextmanager
def _explain_meta(asks: str, advice: str) -> Generator[None]:
    """Raise a `ModelError` for an error of torch about tensors without values."""
    try:
        yield
    except (RuntimeError, TypeError, NotImplementedError) as error:
        text = str(error).lower()
        if "meta" not in text and "incompatible tensor type" not in text:
            raise
        msg = f'TrainState.create(init="shard"): {asks}: {error}. {advice}, {_WHOLE}.'
        raise ModelError(msg) from error


def _why(call: str, setting: Collection[Act]) -> str:
    if not setting:
        return f"{call} leaves unset, or without a number"
    return f"the factory set otherwise than {call}, as by loading it"


def _refuse(model: MetaModel, name: str, why: str, count: int) -> NoReturn:
    module, key = model.places[name][0]
    kind, where = type(module).__name__, name.rpartition(".")[0]
    subject = f"the module {where!r}, a {kind}," if where else f"the model, a {kind},"
    more = f" ({count - 1} more parameters are like it.)" if count > 1 else ""
    reason = why or f"nothing sets, for {kind} has no reset_parameters()"
    theirs = type(module).__module__.startswith("torch.")
    setter = "the module around it" if theirs else kind
    msg = (
        f'TrainState.create(init="shard"): {subject} has a parameter {key!r} which {reason}.'
        f"{more} Give {setter} a method reset_parameters() that sets it, and which __init__"
        f" calls, {_WHOLE}."
    )
    raise ModelError(msg)
