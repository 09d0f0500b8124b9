# SPDX-License-Identifier: Apache-2.0
"""A state's model: its structure without tensors, and copies of it with a state's tensors.

A `Skeleton` is the module with all parameters and buffers on the meta device. Its method
`build` returns a copy of the module that uses the tensors of a state, without copying them.
"""

import copy
import sys
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Container, Generator, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from itertools import chain as joined
from itertools import combinations
from typing import Any, NoReturn, Self, TypeAlias, cast

import attrs
import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from accelfn.base import draws
from accelfn.base.arguments import call_mismatch, find_hint, list_names
from accelfn.base.tree import is_wrapper
from accelfn.errors import Error, ModelError, OptimizerError, StateError

# Seal a model or optimizer after a state has taken ownership of it: every use raises an error.
#
# A state trains copies of the user's object, which use the object's tensors. The user's object
# would show the training until a load replaces the state's tensors, but not afterwards. Hooks,
# modes and learning rates that the user sets on this object would have no effect. So accelfn
# replaces the object's class by a class that raises errors. It also removes the object's
# attributes, because they would keep tensors in memory.


_NOTE = "__accelfn_given__"
_NEW_MODEL = (
    "Pass a factory that creates new modules at each call (not a partial with modules as"
    " arguments), or pass copy.deepcopy(model) to the first TrainState.create."
)


def seal_optimizer(source: object, state: str) -> None:
    """Seal an optimizer that a state has copied; do nothing for a factory."""
    if isinstance(source, Optimizer):
        _seal(source, _GivenOptimizer, state)


def refuse_given(module: nn.Module) -> None:
    """Check that no state has taken ownership of a model or of one of its submodules.

    Raises:
        ModelError: a state has taken ownership.
    """
    waiting = [module]
    while waiting:
        part = waiting.pop()
        if type(part) is _GivenModel:
            kind, state = _note(part)
            subject = "it" if part is module else f"its submodule, a {kind},"
            name = kind if part is module else type(module).__name__
            msg = f"model={name}: {subject} already belongs to the state {state!r}. {_NEW_MODEL}"
            raise ModelError(msg)
        waiting += part.children()


def _seal(instance: object, kind: type, state: str) -> None:
    note = type(instance).__name__, state
    try:
        instance.__class__ = kind
    except TypeError:  # a class written in C cannot be replaced
        return
    fields = object.__getattribute__(instance, "__dict__")
    fields.clear()
    fields[_NOTE] = note


def _note(instance: object) -> tuple[str, str]:
    return object.__getattribute__(instance, "__dict__")[_NOTE]


def _seal_class(base: type, error: type[Error], table: str, now: str) -> type[Any]:
    """Create the class of sealed objects, which raises an error at every use.

    Args:
        base: the class that the new class inherits from, for `isinstance`.
        error: the class of the error.
        table: the table of hints for the names that are used.
        now: the object's relation to the state, for the error.
    """

    def explain(self: object, name: str) -> Error:
        kind, state = _note(self)
        advice = find_hint(table, name) or find_hint(table, "otherwise")
        call = f"{kind}.{name}: you passed this {kind} to TrainState.create"
        return error(f"{call}, and {now.format(state)}. {advice}.")

    def read(self: object, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):  # a name that Python uses
            return object.__getattribute__(self, name)
        raise explain(self, name)

    def write(self: object, name: str, *value: Any) -> None:
        if name != "__class__":
            raise explain(self, name)
        object.__setattr__(self, name, *value)

    def refuse(name: str) -> Callable[..., NoReturn]:
        def method(self: object, *_: Any, **__: Any) -> NoReturn:
            raise explain(self, name)

        return method

    def is_true(_: object) -> bool:
        return True

    def show(self: object) -> str:
        return "<{} given to the state {!r}>".format(*_note(self))

    special = ("__getitem__", "__iter__", "__len__", "__reduce_ex__")
    methods: dict[str, Any] = {name: refuse(name) for name in special}
    methods |= {"__call__": refuse("forward"), "__bool__": is_true}
    methods |= {"__getattribute__": read, "__setattr__": write, "__delattr__": write}
    return type(f"Given{base.__name__}", (base,), {**methods, "__repr__": show})


_GivenModel = _seal_class(
    nn.Module, ModelError, "model", "its tensors now belong to the state {!r}"
)
_GivenOptimizer = _seal_class(
    Optimizer, OptimizerError, "optimizer", "the state {!r} has a copy of it"
)


# Reject models with different parameters that share memory.
#
# In a plain PyTorch loop, an update of one parameter also changes the other. But a state keeps
# each tensor by name. So a copied or loaded state would have separate tensors, and would train
# differently.


def refuse_overlap(module: nn.Module) -> None:
    """Check that no parameter shares elements with another tensor of the model.

    A tied parameter (one object with two names) is allowed. Also allowed are parameters with
    different elements of the same storage, such as those of an LSTM on a GPU.

    Cost: one byte for each element of tensors with overlapping ranges of memory.

    Raises:
        ModelError: two tensors share elements. The message names both.
    """
    params = {id(param) for param in module.parameters()}
    by_storage: dict[tuple[torch.device, int], list[tuple[str, torch.Tensor]]]
    by_storage = defaultdict(list)
    for name, tensor in joined(module.named_parameters(), module.named_buffers()):
        if _has_memory(tensor):
            storage = tensor.untyped_storage().data_ptr()
            by_storage[tensor.device, storage].append((name, tensor))
    for tensors in by_storage.values():
        for (first, one), (second, other) in combinations(tensors, 2):
            is_trained = id(one) in params or id(other) in params
            if is_trained and _overlap(one, other):
                msg = (
                    f"{type(module).__name__}: {first!r} and {second!r} are different tensors in"
                    " the same memory, so a copy or a checkpoint would separate them. Use one"
                    " parameter for both, such as head.weight = embed.weight (transpose it in"
                    " forward), or clone() one of them."
                )
                raise ModelError(msg)


def _has_memory(tensor: torch.Tensor) -> bool:
    plain = type(tensor.data) is torch.Tensor and tensor.layout is torch.strided
    return plain and not tensor.is_meta and tensor.numel() > 0


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors in the same storage share elements."""
    (begin, end), (begins, ends) = _range(one), _range(other)
    if end <= begins or ends <= begin:
        return False
    if one.element_size() != other.element_size():
        return True
    size = one.element_size()
    mask = torch.zeros(max(end, ends) // size, dtype=torch.bool)
    places = [(t.shape, t.stride(), t.storage_offset()) for t in (one, other)]
    mask.as_strided(*places[0]).fill_(1)
    return bool(mask.as_strided(*places[1]).any())


def _range(tensor: torch.Tensor) -> tuple[int, int]:
    """Return a tensor's range of bytes in its storage, as the first byte and the end."""
    size, offset = tensor.element_size(), int(tensor.storage_offset())
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    last = offset + sum(int((length - 1) * stride) for length, stride in pairs)
    return offset * size, (last + 1) * size


# `af.on_devices`: inside of its `with` block, only the forward pass of a model can be used.


PLACED = WeakIdKeyDictionary()
"""The parameters of models inside of a `with af.on_devices(...)` block."""


@contextmanager
def mark_placed(module: nn.Module) -> Generator[None]:
    """In a `with` block, mark a model so that `refuse_placed` rejects it.

    Raises:
        ModelError: the model is marked already.
    """
    refuse_placed(module)
    params = list(module.parameters())
    for param in params:
        PLACED[param] = True
    try:
        yield
    finally:
        for param in params:
            PLACED.pop(param, None)


def refuse_placed(module: nn.Module) -> None:
    """Check that a model is not inside of a `with af.on_devices(...)` block.

    Raises:
        ModelError: a parameter of the model is inside of such a block.
    """
    names = [name for name, param in module.named_parameters() if param in PLACED]
    if names:
        msg = (
            f"{type(module).__name__}: inside `with af.on_devices(...)`, only the forward pass of"
            f" the model works ({names[0]} and others may be on other devices). Use the model"
            " after the `with` block, or pass a factory. To train over several devices, add"
            " af.wrap_fsdp() or af.tensor_parallel() to the setup."
        )
        raise ModelError(msg)


# Reject torch's wrapper modules, such as DDP, because transforms of a setup replace them.


_COMPILER = "torch._dynamo.eval_frame"
_INSIDE = "inside it, ."


def refuse_wrapped(module: nn.Module) -> None:
    """Check that neither a model nor a submodule is one of torch's wrapper modules.

    A wrapper would conflict with the setup's transforms. It also changes the names of the
    parameters, so the model's checkpoints could not be used without the wrapper.

    Raises:
        ModelError: a module is a wrapper.
    """
    wrappers = [*_wrappers()]
    for name, part in module.named_modules():
        for kind, place, fix in wrappers:
            if isinstance(part, kind):
                where = f"model={kind.__name__}" if part is module else f"model.{name}"
                is_one = "" if part is module else f" is a {kind.__name__}"
                msg = f"{where}{is_one}: pass the plain module {place}, and add {fix}."
                raise ModelError(msg)


def _wrappers() -> Iterator[tuple[type[nn.Module], str, str]]:
    """Yield, for each wrapper class: the module to pass instead, and what to add to the setup."""
    inner = f"{_INSIDE}module"
    fix = "af.wrap_ddp() to the setup"
    yield nn.parallel.DistributedDataParallel, inner, fix
    start = "Start a process for each device, with `accelfn launch`"
    yield nn.DataParallel, inner, f"af.shard_data() and {fix}. {start}"
    fix = "af.compile() to the setup, because a module of torch.jit cannot use other tensors"
    yield torch.jit.ScriptModule, "that you passed to torch.jit", fix
    if _COMPILER in sys.modules:  # the import takes a second, so do not import it here
        fix = "af.compile() to the setup, or af.compile(regions=...) for some modules"
        yield sys.modules[_COMPILER].OptimizedModule, f"{_INSIDE}_orig_mod", fix


_CPU = torch.device("cpu")
_TABLES = dict, OrderedDict, set
_GIVEN = WeakIdKeyDictionary()  # parameters that a state has taken ownership of
ModelSource: TypeAlias = nn.Module | Callable[[], nn.Module]


@attrs.frozen(eq=False)
class Skeleton:
    """A module without values: its classes, options, hooks and ties, and what is trained.

    Attributes:
        module: the module, with all parameters and buffers on the meta device.
        trainable: the names of the parameters that are trained, in the module's order.
        aliases: for each further name of a tied parameter, its first name, such as
            `{"head.weight": "embed.weight"}`.
        persistent: the names of the buffers that belong to an exported state dict.
        once_trained: the names of the parameters that are trained now, or were trained before.
    """

    module: nn.Module
    trainable: tuple[str, ...]
    aliases: Mapping[str, str]
    persistent: frozenset[str]
    once_trained: frozenset[str]

    def training(self, names: Container[str]) -> Self:
        """Return the skeleton with other trainable parameters."""
        every = (name for name, _ in self.module.named_parameters())
        trainable = tuple(name for name in every if name in names)
        once = self.once_trained.union(trainable)
        return attrs.evolve(self, trainable=trainable, once_trained=once)

    def build(
        self, params: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor]
    ) -> nn.Module:
        """Return a copy of the module that uses these tensors, without copying them."""
        memo: dict[int, Any] = {}
        trainable = set(self.trainable)
        for name, meta in self.module.named_parameters():
            param = parameter_like(meta, params[name])
            memo[id(meta)] = param.requires_grad_(name in trainable)
        for name, meta in self.module.named_buffers():
            memo[id(meta)] = buffers[name].detach()
        # A module has a dozen dicts of hooks, mostly empty. A deep copy of an empty dict takes
        # as long as a deep copy of a full dict, so create the empty dicts here.
        for module in self.module.modules():
            for table in vars(module).values():
                if type(table) in _TABLES and not table:
                    memo[id(table)] = type(table)()
        return _deep_copy(self.module, memo)


def materialize(
    source: ModelSource, *, seed: int, name: str, device: torch.device
) -> nn.Module:
    """Return the model on a device: the instance itself, or the result of a factory.

    While a factory runs, the random generators are seeded. It runs on the CPU, so the same seed
    gives the same model on every device. If the device is meta, it runs on meta, without random
    numbers.

    Args:
        source: a module, or a factory.
        seed: the seed of the state.
        name: the name of the state.
        device: the device of the state.

    Raises:
        ModelError: the source does not return a module, or the module cannot be trained.
    """
    module = source
    if not isinstance(source, nn.Module):
        check_factory(source)
        context = device if device.type == "meta" else nullcontext()
        with context, draws.seeded(draws.key(seed, name, "init"), _CPU):
            module = source()
    check_module(module, source)
    if device.type != "meta":
        check_values(cast("nn.Module", module), full=True)
    return register_scales(_move_module(cast("nn.Module", module), device))


def _move_module(module: nn.Module, device: torch.device) -> nn.Module:
    """Move a module to a device; a tensor with two names remains one tensor.

    `Module.to` alone would turn a buffer with two names into two buffers, and on some devices
    also a parameter with two names into two parameters.
    """
    tables: list[dict[str, Any]] = []
    for part in module.modules():
        tables += [part._parameters, part._buffers]  # pyright: ignore[reportPrivateUsage]
    before = [(t, n, id(x)) for t in tables for n, x in t.items() if x is not None]
    module.to(device)
    first: dict[int, Any] = {}
    for table, name, key in before:
        table[name] = first.setdefault(key, table[name])
    return module


def check_factory(source: object) -> None:
    """Check that an object can be called without arguments, as a model factory.

    Raises:
        ModelError: the object is not callable, or needs arguments.
    """
    if not callable(source):
        msg = f"model={source!r}: expected a torch.nn.Module, or a function that returns one."
        raise ModelError(msg)
    error = call_mismatch(source)
    if error is not None:
        name = getattr(source, "__name__", "factory")
        msg = (
            f"model={source!r}: accelfn calls a factory without arguments, but this call fails:"
            f" {error}. Write functools.partial({name}, ...)."
        )
        raise ModelError(msg) from error


def check_module(module: object, source: object) -> None:
    """Check that a module can be the model of a state.

    Args:
        module: the user's module, or the result of a factory.
        source: the factory, or the module itself.

    Raises:
        ModelError: the module cannot be trained as it is.
    """
    if not isinstance(module, nn.Module):
        msg = (
            f"model={source!r} returned {type(module).__name__}; expected a function that returns"
            " a torch.nn.Module."
        )
        raise ModelError(msg)
    refuse_given(module)
    refuse_wrapped(module)
    refuse_placed(module)
    _check(module)
    refuse_overlap(module)
    _check_in_one_place(module)


def check_values(module: nn.Module, *, full: bool) -> None:
    """Check that the tensors of a module have values.

    Args:
        module: the module.
        full: whether to check parameters and buffers. False checks only buffers.

    Raises:
        ModelError: a tensor is on the meta device.
    """
    named = [*(module.named_parameters() if full else ()), *module.named_buffers()]
    meta = [name for name, tensor in named if tensor.is_meta]
    if meta:
        msg = (
            f"{type(module).__name__} has tensors on the meta device, which have no values:"
            f" {list_names(meta)}. Load values first with af.import_model(module, files), or pass a"
            ' factory and init="shard". af.memory_estimate(model, setup, optimizer=...) and'
            ' accelfn.testing.communication(fn, device="meta") need no values.'
        )
        raise ModelError(msg)


def _check_in_one_place(module: nn.Module) -> None:
    """Raise `ModelError` if a model is spread over devices, as by Accelerate's device_map."""
    for name, submodule in module.named_modules():
        spread: Any = getattr(submodule, "hf_device_map", None)
        if isinstance(spread, Mapping) and len(set(spread.values())) > 1:
            where = f"its submodule {name!r}" if name else "the model"
            msg = (
                f"{type(module).__name__}: {where} is spread over the devices"
                f" {sorted(map(str, set(spread.values())))} by a device_map, but a state has"
                " one device. Load the model without device_map."
            )
            raise ModelError(msg)


# Quantized parameters of bitsandbytes.
#
# A parameter has the integers, and attributes of it or of its module have the scales. A state
# contains parameters and buffers, so the scales become buffers. Otherwise the integers of a
# checkpoint could meet the scales of another model. The attribute and the buffer are one tensor,
# also in each copy of the module.


def register_scales(module: nn.Module) -> nn.Module:
    """Register the scales of quantized parameters as buffers, and return the module."""
    for owner in [*module.modules()]:
        roots = {n: v for n, v in vars(owner).items() if _is_of_bitsandbytes(v)}
        for name, param in owner.named_parameters(recurse=False):
            if _is_of_bitsandbytes(param):
                for holder, key, path in _tensors_in({name: param, **roots}):
                    tensor = vars(holder)[key]
                    if tensor.is_set_to(param):
                        vars(holder)[key] = param
                    elif all(tensor is not buffer for buffer in owner.buffers()):
                        owner.register_buffer(path, tensor)
    return module


def _tensors_in(objects: Mapping[str, object]) -> Iterator[tuple[object, str, str]]:
    """Yield the tensors in attributes of objects: the holder, the attribute and the path."""
    for name, holder in objects.items():
        attributes = {f"{name}_{key}": (key, v) for key, v in vars(holder).items()}
        for path, (key, value) in attributes.items():
            if isinstance(value, torch.Tensor):
                yield holder, key, path
            elif _is_of_bitsandbytes(value):
                yield from _tensors_in({path: value})


def _is_of_bitsandbytes(value: object) -> bool:
    """Return whether an object has a class of bitsandbytes, and is not a module."""
    is_theirs = type(value).__module__.startswith("bitsandbytes.")
    return is_theirs and not isinstance(value, nn.Module)


def _deep_copy(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Copy a module, with the tensors in `memo`; also copy attributes of the parameters."""
    module_copy = copy.deepcopy(module, memo)
    for param in module.parameters():
        if any(True for _ in _tensors_in({"": param})):
            vars(memo[id(param)]).update(copy.deepcopy(vars(param), memo))
    return module_copy


def skeleton_of(module: nn.Module) -> Skeleton:
    """Return the skeleton of a module, which is not changed.

    Raises:
        ModelError: a parameter has a special tensor class, or the module cannot be copied.
    """
    memo: dict[int, Any] = {}
    for name, param in module.named_parameters():
        if is_wrapper(param):
            msg = (
                f"{type(module).__name__}: {name} is a {type(param).__name__}, a tensor class"
                " that cannot be saved in a checkpoint. Use plain parameters. To compute in 8"
                ' bits, add af.autocast("fp8") to the setup.'
            )
            raise ModelError(msg)
        memo[id(param)] = parameter_like(param, torch.empty_like(param, device="meta"))
    for buffer in module.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    try:
        structure = _deep_copy(module, memo)
    except (RuntimeError, TypeError) as error:
        where = next(_uncopyable(module, memo), "")
        msg = (
            f"{type(module).__name__} cannot be copied{where}: {error}. Register tensors of a"
            " module as parameters or buffers, not as plain attributes, and keep process groups,"
            " locks and open files out of it."
        )
        raise ModelError(msg) from error
    if not structure.training:
        # from_pretrained returns models in evaluation mode, and users would call train()
        structure.train()
    names = {id(param): name for name, param in module.named_parameters()}
    every = module.named_parameters(remove_duplicate=False)
    persistent = set(module.state_dict(keep_vars=True))
    trainable = tuple(n for n, p in module.named_parameters() if p.requires_grad)
    return Skeleton(
        module=structure,
        trainable=trainable,
        once_trained=frozenset(trainable),
        aliases={name: names[id(p)] for name, p in every if name != names[id(p)]},
        persistent=frozenset(n for n, _ in module.named_buffers() if n in persistent),
    )


def _uncopyable(module: nn.Module, memo: Mapping[int, Any]) -> Iterator[str]:
    """Yield a text for each attribute of a module or submodule that cannot be copied."""
    for name, submodule in module.named_modules():
        for attribute, value in vars(submodule).items():
            if isinstance(value, dict) and attribute.startswith("_"):
                continue  # dicts that torch uses
            try:
                copy.deepcopy(value, dict(memo))
            except (RuntimeError, TypeError):
                path = ".".join(filter(None, (name, attribute)))
                yield f" because of its attribute {path!r}"


def check_params(
    params: Mapping[str, torch.Tensor],
    current: Mapping[str, torch.Tensor],
    aliases: Mapping[str, str],
) -> None:
    """Check that new parameters can replace the current parameters of a state.

    Args:
        params: the new parameters by name. Tied parameters may have several names.
        current: the current parameters by name.
        aliases: for each further name of a tied parameter, its first name.

    Raises:
        StateError: names, shapes, dtypes or devices differ, or a tied parameter has different
            values under its names.
    """
    if not isinstance(params, Mapping):
        msg = (
            f"state.with_params: got {type(params).__name__}; expected a dict from names to"
            " tensors, such as state.params or dict(model.named_parameters())."
        )
        raise StateError(msg)
    missing, extra = current.keys() - params.keys(), params.keys() - current.keys()
    extra -= aliases.keys()
    if missing or extra:
        lacks = f" Missing: {', '.join(sorted(missing))}." if missing else ""
        more = f" Not in the model: {', '.join(map(str, extra))}." if extra else ""
        msg = f"state.with_params: the names differ from the model's.{lacks}{more}"
        raise StateError(msg)
    for name, tensor in current.items():
        new = params[name]
        if not isinstance(new, torch.Tensor):
            msg = f"state.with_params: {name!r} is {type(new).__name__}, not a tensor."
            raise StateError(msg)
        want = (tuple(tensor.shape), tensor.dtype, tensor.device)
        have = (tuple(new.shape), new.dtype, new.device)
        if want != have:
            msg = (
                "state.with_params: {!r} is a tensor of shape {}, {} on {}, but in the model its"
                " shape is {}, {} on {}.".format(name, *have, *want)
            )
            raise StateError(msg)
    for name in aliases.keys() & params.keys():
        one, two = params[aliases[name]], params[name]
        if one is not two and not torch.equal(one, two):
            msg = f"state.with_params: {name!r} is tied to {aliases[name]!r}. Pass equal values."
            raise StateError(msg)


def parameter_like(param: torch.Tensor, data: torch.Tensor) -> nn.Parameter:
    """Create a parameter with these data, and with the attributes of another parameter."""
    new = nn.Parameter(data.detach(), requires_grad=param.requires_grad)
    vars(new).update(vars(param))
    return new


def give_away(module: nn.Module, name: str) -> None:
    """Seal a module after a state has taken ownership of its tensors.

    Parameters that the user still has become empty, because they would change with the
    training. A submodule without tensors, such as an activation, remains usable.

    Args:
        module: the user's module.
        name: the name of the state.
    """
    for param in module.parameters():
        _GIVEN[param] = True
        param.data = torch.empty(0, dtype=param.dtype, device=param.device)
    parts = [m for m in module.modules() if [*m.parameters(), *m.buffers()]]
    for part in parts:
        _seal(part, _GivenModel, name)


def _check(module: nn.Module) -> None:
    """Raise `ModelError` if a state cannot have a module's tensors, and name them."""
    params = dict(module.named_parameters())
    foreign = [name for name, param in params.items() if param in _GIVEN]
    with_hooks = [
        name
        for name, param in params.items()
        if param._backward_hooks  # pyright: ignore[reportPrivateUsage]
        or getattr(param, "_post_accumulate_grad_hooks", None)
    ]
    buffers = dict(module.named_buffers())
    lazy = [name for name, tensor in (params | buffers).items() if is_lazy(tensor)]
    # a step cannot copy or send these buffers
    odd = [
        n for n, b in buffers.items() if b.layout is not torch.strided or b.is_nested
    ]
    hooks = (
        "A state trains copies without these hooks. Change gradients in the method `grads` of a"
        " transform. (Hooks of modules are kept.)"
    )
    call = "Call the model once on an example before you pass it."
    dense = "Register their indices and values as buffers."
    for names, kind, advice in (
        (foreign, "parameters that already belong to another state", _NEW_MODEL),
        (with_hooks, "parameters with hooks", hooks),
        (lazy, "lazy parameters without a shape", call),
        (odd, "buffers that are not dense tensors", dense),
    ):
        if names:
            msg = f"{type(module).__name__} has {kind}: {list_names(names)}. {advice}"
            raise ModelError(msg)
    if not any(param.requires_grad for param in params.values()):
        msg = (
            f"{type(module).__name__} has no trainable parameter ({len(params)} parameters in all)."
            " Call requires_grad_(True) on the parameters to train."
        )
        raise ModelError(msg)


# Run factories without memory for parameters: each registered parameter moves to meta.


@contextmanager
def parameters_on_meta(
    on_move: Callable[[nn.Parameter, nn.Parameter], object] | None = None,
) -> Generator[None]:
    """In a `with` block, move each parameter to the meta device when a module registers it.

    Most modules register a parameter before they write its values. Then its memory is never
    used. Modules of other threads are not affected.

    Args:
        on_move: called with each parameter and its replacement, before the values are dropped.

    Raises:
        ModelError: a parameter is lazy.
    """
    ours, copies = threading.get_ident(), WeakIdKeyDictionary()

    def move_param(
        module: nn.Module, name: str, param: nn.Parameter | None
    ) -> nn.Parameter | None:
        if param is None or param.is_meta or threading.get_ident() != ours:
            return None
        if is_lazy(param):
            msg = (
                f"{type(module).__name__} has a lazy parameter {name}, which has no shape before"
                " the first call. Use a layer with sizes: nn.Linear(in_features, out_features)."
            )
            raise ModelError(msg)
        if param not in copies:  # a tied parameter remains one tensor
            copies[param] = parameter_like(param, param.to("meta"))
            if on_move is not None:
                on_move(param, copies[param])
        return copies[param]

    hook = cast("Callable[..., None]", move_param)  # torch's type lacks the parameter
    handle = register_module_parameter_registration_hook(hook)
    try:
        yield
    finally:
        handle.remove()
