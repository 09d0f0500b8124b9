# SPDX-License-Identifier: Apache-2.0
"""Initialize a model module by module, so that no rank ever has the full model in memory.

The factory runs with its parameters on the meta device. Then accelfn creates the parameters of
one module, calls its `reset_parameters`, keeps this rank's shards, and frees the parameters
before the next module. The random generator is seeded for each module by the module's name, so
the values do not depend on other modules.
"""

import math
import sys
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn, TypeAlias, cast

import attrs
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from accelfn.base import draws, tree
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

# Record the operations on parameters that have no values.
#
# A factory that runs with its parameters on the meta device leaves no values. But the recorded
# operations show how the factory would set each parameter: in the same way as the module's
# `reset_parameters`, or in another way, for example from a file.


Act: TypeAlias = tuple[Any, ...]
"""An operation and its numeric arguments."""

# The private names below are needed, because torch has no public function that identifies a
# storage without memory.

_aten: Any = torch.ops.aten
_EMPTY = {
    _aten.empty.memory_format,
    _aten.empty_like.default,
    _aten.empty_strided.default,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
}
# Transformers pads the biases of tied layers, mostly by 0 rows
_PAD = _aten.constant_pad_nd.default
_COPIES = {_aten.clone.default, _aten._to_copy.default}
_IS_META = cast("Any", torch.Tensor.is_meta).__get__
_VALUES = "<values>"
_FULL = "<full of>"
_CAST = 1e-2  # the tolerance for numbers that a conversion between dtypes has rounded


@contextmanager
def record_operations() -> Generator["OperationRecord"]:
    """Record all operations on meta tensors in a `with` block."""
    acts = OperationRecord()
    with _Looks(acts), acts:
        yield acts


class OperationRecord(TorchDispatchMode):
    """Records the operations that write to meta tensors.

    A tensor is identified by its storage, because views share the storage. The record keeps the
    storages alive, so that no other tensor gets the same id. On meta they need no memory.
    """

    def __init__(self) -> None:
        """Create an empty record."""
        super().__init__()
        self._acts: dict[int, list[Act]] = {}
        self._unwritten: set[int] = set()
        self._alive: dict[int, torch.UntypedStorage] = {}

    def on(self, tensor: torch.Tensor) -> tuple[Act, ...]:
        """Return the operations that have written to a tensor, in order."""
        return tuple(self._acts.get(_memory(tensor), ()))

    def begins(self, original: nn.Parameter, param: nn.Parameter) -> None:
        """Record the initial values of a parameter before it moves to the meta device.

        The record only shows whether the values are unset, one number everywhere, or other
        values.
        """
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
        """Add an operation to the record of a tensor."""
        self._note(tensor, [*self.on(tensor), act])

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Call a torch operation, and record it."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        act = (str(func), *_numbers(args), *_numbers(kwargs.values()))
        inputs = _tensors([args, kwargs])
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
    """Records the functions of torch.nn.init that do nothing for meta tensors.

    `trunc_normal_`, `orthogonal_`, `dirac_` and `sparse_` only read `is_meta` of a meta tensor.
    """

    def __init__(self, acts: OperationRecord) -> None:
        super().__init__()
        self._acts = acts

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Call a function; if torch.nn.init reads `is_meta`, record its calling function."""
        if func == _IS_META and args[0].is_meta:
            asking = sys._getframe(1)
            code = asking.f_code
            if asking.f_globals is vars(nn.init):
                names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
                numbers = _numbers(asking.f_locals[name] for name in names)
                self._acts.leaves(args[0], (code.co_name, *numbers))
        return func(*args, **(kwargs or {}))


def sets_alike(setting: Sequence[Act], acts: Sequence[Act]) -> bool:
    """Return whether an initializer sets a parameter in the same way as the factory.

    The result is true if the factory wrote nothing, or if its last operations are those of the
    initializer. An operation that copies values, for example from a file, does not show where
    the values are from. So the factory must not have more such copies than the initializer.

    Args:
        setting: the operations of the initializer on the parameter.
        acts: the operations of the factory on the parameter.
    """
    if not setting or not acts or is_full(acts):
        return bool(setting)
    copies = [act for act in setting if _VALUES in act]
    return list(acts[-len(setting) :]) == list(setting) and all(
        acts.count(act) == setting.count(act) for act in copies
    )


def is_full(acts: Sequence[Act]) -> bool:
    """Return whether a parameter was created with the same number everywhere, and not changed."""
    return len(acts) == 1 and acts[0][0] == _FULL


def is_as_made(tensor: torch.Tensor, acts: Sequence[Act]) -> bool:
    """Return whether a tensor has the factory's values; True if these values are unknown."""
    if not is_full(acts) or tensor.is_complex():
        return True
    ends = (float(end) for end in tensor.aminmax())
    return all(math.isclose(end, acts[0][1], rel_tol=_CAST) for end in ends)


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _tensors(values: object) -> list[torch.Tensor]:
    return [t for t in tree.tensor_leaves(values) if t.layout is torch.strided]


def _written_tensors(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[torch.Tensor]:
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            at_place = args[place] if place < len(args) else None
            yield from _tensors(kwargs.get(argument.name, at_place))


def _numbers(values: Iterable[Any]) -> Iterator[Any]:
    """Yield the numeric arguments of an operation; a placeholder replaces values of tensors."""
    for value in values:
        if isinstance(value, torch.Tensor):
            if not value.is_meta:
                yield value.item() if value.ndim == 0 else _VALUES
        elif isinstance(value, (list, tuple)):
            yield from _numbers(value)
        elif not isinstance(value, (torch.device, torch.Generator)):
            yield value


# The private `_parameters` is needed, because torch has no public function for the parameters
# that are directly in a module.

Keep: TypeAlias = Callable[[str, torch.Tensor], torch.Tensor]
_CPU = torch.device("cpu")
_WHOLE = 'or pass init="whole", which runs the full factory on each rank'


@attrs.frozen(eq=False)
class MetaModel:
    """A model with parameters that have no values.

    Attributes:
        module: the module. Its parameters are on the meta device, its buffers are real.
        acts: for each parameter name, the operations of the factory on the parameter.
        places: for each parameter name, the modules that have the parameter, and the name of
            the attribute in each.
    """

    module: nn.Module
    acts: Mapping[str, tuple[Act, ...]]
    places: Mapping[str, list[tuple[nn.Module, str]]]

    def put(self, params: Mapping[str, torch.Tensor]) -> None:
        """Replace parameters of the model, by name."""
        for name, param in params.items():
            for module, key in self.places[name]:
                module._parameters[key] = cast("nn.Parameter", param)


def build_on_meta(source: ModelSource, *, seed: int, name: str) -> MetaModel:
    """Run a factory with its parameters on the meta device, and return the model.

    Raises:
        ModelError: the source is not a factory, reads values of parameters, or returns
            parameters that existed before. Or the model cannot be trained.
    """
    if isinstance(source, nn.Module):
        msg = (
            f'TrainState.create(model={type(source).__name__}(...), init="shard"): the full model'
            " exists already. Pass a factory, such as"
            f' functools.partial({type(source).__name__}, ...), or pass init="whole".'
        )
        raise ModelError(msg)
    check_factory(source)
    with draws.seeded(draws.key(seed, name, "init"), _CPU):
        asks = f"the factory {source!r} reads values of parameters, which have no values yet"
        advice = "Set the parameters in a method reset_parameters() of their module"
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
                f'TrainState.create(init="shard"): {path!r} of {type(module).__name__} existed'
                " before the factory ran, or is a copy of such a parameter. Let the factory"
                ' create all modules, or pass init="whole".'
            )
            raise ModelError(msg)
    params = dict(module.named_parameters())
    return MetaModel(
        module, {n: acts.on(p) for n, p in params.items()}, _places(module)
    )


def draw_params(
    model: MetaModel, keep: Keep, *, seed: int, name: str
) -> dict[str, torch.Tensor]:
    """Initialize each parameter, and return the part of it that this rank keeps.

    The module that has a parameter initializes it. If that module would set it in another way
    than the factory, the nearest enclosing module that fits initializes it. For example, an
    attention module sets the bias of its layer. Inner modules come before outer modules.

    Args:
        model: the model, which remains without values.
        keep: a function of a parameter's name and values that returns the part to keep.
        seed: the seed of the random numbers.
        name: the name of the state.

    Raises:
        ModelError: no module sets a parameter in the same way as the factory.
    """
    params: dict[str, torch.Tensor] = {}
    drawing = _Drawing(model, keep, params, {})
    for where, module in reversed(list(model.module.named_modules())):
        begin = f"{where}." if where else ""
        # add names module by module: thousands of experts would make the search below slow
        names = (begin + key for key in module._parameters)
        drawing.pending.update({name: "" for name in names if name in model.places})
        for call, init in _initializers(model.module, where, module):
            due = [name for name in drawing.pending if name.startswith(begin)]
            if not due:
                break
            asks = f"{call} reads values that do not exist while it sets parameters"
            with _explain_meta(asks, "Let it set only parameters of its own module"):
                drawing.by(init, call, due, draws.key(seed, name, "init", where))
    for lacking, why in drawing.pending.items():
        _refuse(model, lacking, why, len(drawing.pending))
    return {n: params[n] for n, _ in model.module.named_parameters()}


@attrs.frozen(eq=False)
class _Drawing:
    """The progress of `draw_params`: the kept parts, and why other parameters are pending."""

    bare: MetaModel
    keep: Keep
    kept: dict[str, torch.Tensor]
    pending: dict[str, str]

    def by(
        self, init: Callable[[], object], call: str, due: Sequence[str], key: int
    ) -> None:
        """Initialize the parameters that a function sets in the same way as the factory.

        Args:
            init: the function, such as a module's `reset_parameters`.
            call: the name of the function in errors.
            due: the names of the parameters that are not initialized yet.
            key: the key of the random numbers.
        """
        metas = {name: self.bare.module.get_parameter(name) for name in due}
        with draws.seeded(key, _CPU), torch.no_grad(), record_operations() as acts:
            init()
        setting = {name: acts.on(meta) for name, meta in metas.items()}
        unset = f"{call} does not set, or sets to NaN"
        other = f"the factory sets otherwise than {call}, for example by loading it"
        for name in due:
            self.pending[name] = other if setting[name] else self.pending[name] or unset
        matches = {
            name: metas[name]
            for name in due
            if sets_alike(setting[name], self.bare.acts[name])
            or not metas[name].numel()
        }
        if not matches:
            return
        blanks = {name: _unset(meta) for name, meta in matches.items()}
        self.bare.put(blanks)
        try:
            with draws.seeded(key, _CPU), torch.no_grad():
                init()
        finally:
            self.bare.put(matches)
        for name in matches:
            values = blanks.pop(name).detach()
            if _is_unset(values):
                self.pending[name] = unset
            elif is_as_made(values, self.bare.acts[name]):
                del self.pending[name]
                self.kept[name] = self.keep(name, values)


def _initializers(
    root: nn.Module, where: str, module: nn.Module
) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield the functions that initialize a module, with their names for errors.

    `_init_weights` of Transformers comes before torch's `reset_parameters`.
    """
    kind = type(module).__name__
    for parent in _enclosing_modules(root, where):
        convention: Any = getattr(parent, "_init_weights", None)
        if callable(convention) and call_mismatch(convention, module) is None:
            call = f"{type(parent).__name__}._init_weights({kind})"
            yield call, partial(convention, module)
            break
    # torch's MultiheadAttention has the second name
    for name in ("reset_parameters", "_reset_parameters"):
        method: Any = getattr(module, name, None)
        if callable(method) and call_mismatch(method) is None:
            yield f"{kind}.{name}()", method


def _enclosing_modules(root: nn.Module, where: str) -> Iterator[nn.Module]:
    """Yield a module and the modules that contain it, from the inside to the outside."""
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


def _unset(meta: torch.Tensor) -> nn.Parameter:
    """Return a parameter filled with NaN, or with 0 if its dtype has no NaN."""
    values = torch.empty_like(meta, device="cpu").detach()
    has_nan = values.is_floating_point() or values.is_complex()
    values.fill_(torch.nan if has_nan else 0)
    return nn.Parameter(values, requires_grad=meta.requires_grad)


def _is_unset(values: torch.Tensor) -> bool:
    """Return whether any element is NaN, without allocating a tensor of the same size."""
    plain = torch.view_as_real(values) if values.is_complex() else values
    if not plain.is_floating_point() or not plain.numel():
        return False
    plain = plain.float() if plain.dtype.itemsize == 1 else plain
    return bool(plain.min().isnan())


@contextmanager
def _explain_meta(asks: str, advice: str) -> Generator[None]:
    """Turn an error of torch about tensors without values in a `with` block into a `ModelError`.

    Args:
        asks: who reads which values, in words for the message.
        advice: what to change.
    """
    try:
        yield
    except (RuntimeError, TypeError, NotImplementedError) as error:
        text = str(error).lower()
        if "meta" not in text and "incompatible tensor type" not in text:
            raise
        msg = f'TrainState.create(init="shard"): {asks}: {error}. {advice}, {_WHOLE}.'
        raise ModelError(msg) from error


def _refuse(model: MetaModel, name: str, why: str, count: int) -> NoReturn:
    module, key = model.places[name][0]
    kind, where = type(module).__name__, name.rpartition(".")[0]
    subject = f"the module {where!r}, a {kind}," if where else f"the model, a {kind},"
    more = f" ({count - 1} more parameters have such a problem.)" if count > 1 else ""
    reason = why or f"nothing sets, because {kind} has no method reset_parameters()"
    theirs = type(module).__module__.startswith("torch.")
    setter = "the module around it" if theirs else kind
    msg = (
        f'TrainState.create(init="shard"): {subject} has a parameter {key!r} that {reason}.'
        f"{more} Add a method reset_parameters() to {setter} that sets the parameter, and call"
        f" it in __init__, {_WHOLE}."
    )
    raise ModelError(msg)
