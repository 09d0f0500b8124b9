# SPDX-License-Identifier: Apache-2.0
"""The model's structure without its tensors, and copies of it around given tensors.

A `Skeleton` is the module with every parameter and buffer on the meta device. `build`
copies that structure around tensors of a state, without copying the tensors.
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
from accelfn.base.arguments import call_mismatch
from accelfn.base.tree import is_wrapper
from accelfn.errors import Error, ModelError, OptimizerError, StateError

# Sealing a model or optimizer after a state has taken ownership.
#
# A state trains copies around the tensors of the user's object. The object would follow until
# a load replaces the state's tensors, and never again. Hooks, modes and rates set on it would
# have no effect. So every use of it raises. Its class is replaced and its contents are
# dropped, so it keeps no tensor alive.


_NOTE = "__accelfn_given__"
_NEW_MODEL = (
    "Give a factory that makes new modules at each call (not a partial over modules), or"
    " copy.deepcopy(model) before the first."
)


def seal_optimizer(source: object, state: str) -> None:
    """Seal an optimizer that a state has copied; a factory stays usable."""
    if isinstance(source, Optimizer):
        _seal(source, _GivenOptimizer, state)


def refuse_given(module: nn.Module) -> None:
    """Raise if a model, or a part of it, belongs to another state.

    Raises:
        ModelError: a part belongs to another state.
    """
    waiting = [module]
    while waiting:
        part = waiting.pop()
        if type(part) is _GivenModel:
            kind, state = _note(part)
            subject = "It" if part is module else f"Its {kind}"
            name = kind if part is module else type(module).__name__
            msg = f"model={name}: {subject} is another state's already, {state!r}. {_NEW_MODEL}"
            raise ModelError(msg)
        waiting += part.children()


def _seal(instance: object, kind: type, state: str) -> None:
    note = type(instance).__name__, state
    try:
        instance.__class__ = kind
    except TypeError:  # its class is written in C, and stays
        return
    fields = object.__getattribute__(instance, "__dict__")
    fields.clear()
    fields[_NOTE] = note


def _note(instance: object) -> tuple[str, str]:
    return object.__getattribute__(instance, "__dict__")[_NOTE]


def _model_error(instance: object, name: str) -> ModelError:
    kind, state = _note(instance)
    return ModelError(
        f"{kind}.{name}: this {kind} was given to TrainState.create, and its tensors belong to"
        f" the state {state!r}. Write `with af.borrow_model(state) as model:` for a module,"
        " af.full_params(state) for the weights, or af.export_model(state, path) for files."
        " Set modes, hooks and requires_grad_ before create, or use state.with_trainable. To"
        " keep a model of your own, pass copy.deepcopy(model)."
    )


def _optimizer_error(instance: object, name: str) -> OptimizerError:
    kind, state = _note(instance)
    return OptimizerError(
        f"{kind}.{name}: this {kind} was given to TrainState.create, and the state"
        f" {state!r} has its options and its own state. Step it by af.make_step, read"
        " state.lrs and state.opt_state, and set rates by schedule= or a transform's hyper."
    )


def _seal_class(base: type, error: Callable[[object, str], Error]) -> type[Any]:
    """Create the class of an object after a state has taken ownership; every use raises."""

    def read(self: object, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):  # Python's own
            return object.__getattribute__(self, name)
        raise error(self, name)

    def write(self: object, name: str, *value: Any) -> None:
        if name != "__class__":
            raise error(self, name)
        object.__setattr__(self, name, *value)

    def refuse(name: str) -> Callable[..., NoReturn]:
        def method(self: object, *_: Any, **__: Any) -> NoReturn:
            raise error(self, name)

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


_GivenModel = _seal_class(nn.Module, _model_error)
_GivenOptimizer = _seal_class(Optimizer, _optimizer_error)


# Different parameters of a model that share memory.
#
# In a plain loop an update of either changes both. A state keeps each tensor by name. A copied
# or loaded state would have separate tensors, and would train differently.


def refuse_overlap(module: nn.Module) -> None:
    """Raise if a parameter shares elements with another tensor of the model.

    A tied parameter, one object under two names, is one tensor and fine. So are parameters
    with different elements of one memory, such as those of an LSTM on a GPU.

    Cost: one byte per element of tensors with overlapping ranges.

    Raises:
        ModelError: two tensors overlap; the error names both.
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
                    f"{type(module).__name__}: {first!r} and {second!r} lie in the same"
                    " memory and are not one parameter, so a copy or a checkpoint would"
                    " separate them. Tie them by one object, as in head.weight ="
                    " embed.weight, and transpose in forward; or give one of them a clone()."
                )
                raise ModelError(msg)


def _has_memory(tensor: torch.Tensor) -> bool:
    plain = type(tensor.data) is torch.Tensor and tensor.layout is torch.strided
    return plain and not tensor.is_meta and tensor.numel() > 0


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors of one storage overlap."""
    (begin, end), (begins, ends) = _range(one), _range(other)
    if end <= begins or ends <= begin:
        return False
    if one.element_size() != other.element_size():
        return True
    size = one.element_size()
    mask = torch.zeros(max(end, ends) // size, dtype=torch.bool)
    for tensor in (one, other):
        marks = mask.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        if tensor is one:
            marks.fill_(1)
        elif marks.any():
            return True
    return False


def _range(tensor: torch.Tensor) -> tuple[int, int]:
    """Return a tensor's range of bytes in its storage: the first, and the end."""
    size, offset = tensor.element_size(), int(tensor.storage_offset())
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    last = offset + sum(int((length - 1) * stride) for length, stride in pairs)
    return offset * size, (last + 1) * size


# Placed models (`af.plan_devices`): only their forward pass works.


PLACED = WeakIdKeyDictionary()
"""Parameters that are elsewhere until their context ends."""


@contextmanager
def mark_placed(module: nn.Module) -> Generator[None]:
    """Let only the forward pass of a model work in a `with` block; others refuse it.

    Raises:
        ModelError: it is placed already.
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
    """Raise if a model, or a part of it, is placed by `af.on_devices`.

    Raises:
        ModelError: a parameter is placed.
    """
    names = [name for name, param in module.named_parameters() if param in PLACED]
    if names:
        msg = (
            f"{type(module).__name__} is placed by af.on_devices, {names[0]} among others, for its"
            " forward pass only. Use it after the `with` block, or give a factory. To train over"
            " several devices, add af.wrap_fsdp() or af.tensor_parallel() to the setup."
        )
        raise ModelError(msg)


# torch's wrapper modules, such as DDP; a setup wraps the loss instead.


_COMPILER = "torch._dynamo.eval_frame"
_INSIDE = "that it wraps, its ."


def refuse_wrapped(module: nn.Module) -> None:
    """Raise if a model or a submodule is one of torch's wrappers.

    A wrapper would work inside of each replica, shard or graph. It also changes the names of
    the parameters, so checkpoints would differ from those of other programs.

    Raises:
        ModelError: a module is a wrapper.
    """
    wrappers = [*_wrappers()]
    for name, part in module.named_modules():
        for kind, place, fix in wrappers:
            if isinstance(part, kind):
                where = f"model={kind.__name__}" if part is module else f"model.{name}"
                is_one = "" if part is module else f" is a {kind.__name__}"
                msg = f"{where}{is_one}: give the plain module {place}, and put {fix}."
                raise ModelError(msg)


def _wrappers() -> Iterator[tuple[type[nn.Module], str, str]]:
    """Yield kinds of wrappers, the module to pass instead, and accelfn's equivalent."""
    inner = f"{_INSIDE}module"
    fix = "af.wrap_ddp() into the setup, which wraps the loss in one"
    yield nn.parallel.DistributedDataParallel, inner, fix
    fix = "af.shard_data() and af.wrap_ddp() into the setup, with a process for each device"
    yield nn.DataParallel, inner, f"{fix}, as `accelfn launch` starts them"
    fix = "af.compile() into the setup: what torch.jit compiled takes no other tensors"
    yield torch.jit.ScriptModule, "that torch.jit compiled", fix
    if _COMPILER in sys.modules:  # else nobody has compiled any, and it takes a second
        fix = "af.compile() into the setup, or af.compile(regions=...) for parts of a model"
        yield sys.modules[_COMPILER].OptimizedModule, f"{_INSIDE}_orig_mod", fix


_CPU = torch.device("cpu")
_TABLES = dict, OrderedDict, set
_GIVEN = WeakIdKeyDictionary()  # parameters that a state took
ModelSource: TypeAlias = nn.Module | Callable[[], nn.Module]


@attrs.frozen(eq=False)
class Skeleton:
    """A module's structure: classes, options, hooks, ties, and which parts are trained.

    Attributes:
        module: the module with meta tensors in place of its parameters and buffers.
        trainable: names of the parameters that require a gradient, in the module's order.
        aliases: further names of tied parameters, by name: `{"head.weight": "embed.weight"}`.
        persistent: names of the buffers that belong in an exported state dict.
        once_trained: names of the parameters that are trained, or were trained before.
    """

    module: nn.Module
    trainable: tuple[str, ...]
    aliases: Mapping[str, str]
    persistent: frozenset[str]
    once_trained: frozenset[str] = attrs.field(
        default=attrs.Factory(lambda self: frozenset(self.trainable), takes_self=True)
    )

    def training(self, names: Container[str]) -> Self:
        """Return the structure with other trainable parameters."""
        every = (name for name, _ in self.module.named_parameters())
        trainable = tuple(name for name in every if name in names)
        once = self.once_trained.union(trainable)
        return attrs.evolve(self, trainable=trainable, once_trained=once)

    def build(
        self, params: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor]
    ) -> nn.Module:
        """Return a copy of the structure around these tensors, which are shared."""
        memo: dict[int, Any] = {}
        trainable = set(self.trainable)
        for name, meta in self.module.named_parameters():
            param = parameter_like(meta, params[name])
            memo[id(meta)] = param.requires_grad_(name in trainable)
        for name, meta in self.module.named_buffers():
            memo[id(meta)] = buffers[name].detach()
        # a module has a dozen tables of hooks, nearly all empty, and a deep copy of an empty
        # table takes as long as that of a full table
        for module in self.module.modules():
            for table in vars(module).values():
                if type(table) in _TABLES and not table:
                    memo[id(table)] = type(table)()
        return copy.deepcopy(self.module, memo)


def materialize(
    source: ModelSource, *, seed: int, name: str, device: torch.device
) -> nn.Module:
    """Return the module of a factory, drawn from the seed, or the instance itself.

    A factory runs on the CPU, so the same seed gives the same model on every device. On the
    meta device it runs there, and draws nothing.

    Raises:
        ModelError: the source gives no module, or a module that cannot be trained.
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
    return _move_module(cast("nn.Module", module), device)


def _move_module(module: nn.Module, device: torch.device) -> nn.Module:
    """Return the module on a device; a tensor with two names stays one tensor.

    `Module.to` makes two buffers of a buffer with two names, and on some devices two
    parameters.
    """
    tables = [(m._parameters, m._buffers) for m in module.modules()]  # pyright: ignore[reportPrivateUsage]
    before = [
        (table, name, tensor)
        for pair in tables
        for table in pair
        for name, tensor in table.items()
        if tensor is not None
    ]
    module.to(device)
    first: dict[int, Any] = {}
    for table, name, tensor in before:
        new: Any = table[name]
        cast("dict[str, Any]", table)[name] = first.setdefault(id(tensor), new)
    return module


def check_factory(source: object) -> None:
    """Raise unless an object can be called as a model factory.

    Raises:
        ModelError: the object is not callable, or needs arguments.
    """
    if not callable(source):
        msg = f"model={source!r}: expected a torch.nn.Module, or a factory of one."
        raise ModelError(msg)
    error = call_mismatch(source)
    if error is not None:
        name = getattr(source, "__name__", "factory")
        msg = (
            f"model={source!r}: expected a module, or a factory that takes no argument;"
            f" this one: {error}. Write functools.partial({name}, ...)."
        )
        raise ModelError(msg) from error


def check_module(module: object, source: object) -> None:
    """Raise unless a module can become a state's model.

    Args:
        module: the user's module, or the result of a factory.
        source: the factory, or the module itself.

    Raises:
        ModelError: the module cannot be trained as it is.
    """
    if not isinstance(module, nn.Module):
        msg = (
            f"model={source!r} gave {type(module).__name__}; expected a"
            " torch.nn.Module, or a factory that takes no argument and returns one."
        )
        raise ModelError(msg)
    refuse_given(module)
    refuse_wrapped(module)
    refuse_placed(module)
    _check(module)
    _refuse_sparse_buffers(module)
    refuse_overlap(module)
    _check_in_one_place(module)


def check_values(module: nn.Module, *, full: bool) -> None:
    """Raise unless a module's tensors have values; uninitialized parameters need no values.

    Raises:
        ModelError: a tensor is on the meta device.
    """
    named = [*(module.named_parameters() if full else ()), *module.named_buffers()]
    meta = [name for name, tensor in named if tensor.is_meta]
    if meta:
        msg = (
            f"{len(meta)} tensors of {type(module).__name__} are on the meta device and"
            f" hold no values: {', '.join(meta[:5])}{', ...' if len(meta) > 5 else ''}."
            " Load them first (af.import_model(module, files)), or draw a factory's module by"
            ' module: init="shard". af.memory_estimate(model, setup, optimizer=...) and'
            ' accelfn.testing.communication(fn, device="meta") need no values.'
        )
        raise ModelError(msg)


def _check_in_one_place(module: nn.Module) -> None:
    """Raise if hooks spread a model over devices, as Accelerate's do."""
    for name, submodule in module.named_modules():
        spread: Any = getattr(submodule, "hf_device_map", None)
        if isinstance(spread, Mapping) and len(set(spread.values())) > 1:
            where = f"its {name!r} " if name else ""
            msg = (
                f"{type(module).__name__}: {where}was spread over devices"
                f" {sorted(map(str, set(spread.values())))} by a device_map, but a state has"
                " one device. Load the model without device_map."
            )
            raise ModelError(msg)


def _refuse_sparse_buffers(module: nn.Module) -> None:
    """Raise for buffers that are not dense; a step cannot compare, copy or send them."""
    for name, buffer in module.named_buffers():
        if buffer.layout is not torch.strided or buffer.is_nested:
            kind = "a nested tensor" if buffer.is_nested else f"{buffer.layout}"
            msg = (
                f"{type(module).__name__}: the buffer {name!r} is {kind}, and a state has"
                " dense tensors. Keep its parts, such as indices and values, as buffers."
            )
            raise ModelError(msg)


def skeleton_of(module: nn.Module) -> Skeleton:
    """Return the structure of a module; the module is unchanged."""
    memo: dict[int, Any] = {}
    for name, param in module.named_parameters():
        if is_wrapper(param):
            msg = (
                f"{type(module).__name__}: {name} is a {type(param).__name__}, a tensor class"
                " that no checkpoint can hold. Give plain parameters; to compute in 8 bits, add"
                ' af.autocast("fp8") to the setup.'
            )
            raise ModelError(msg)
        memo[id(param)] = parameter_like(param, torch.empty_like(param, device="meta"))
    for buffer in module.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    try:
        structure = copy.deepcopy(module, memo)
    except (RuntimeError, TypeError) as error:
        where = next(_uncopyable(module, memo), "")
        msg = (
            f"{type(module).__name__} cannot be copied{where}: {error}. A module keeps its"
            " tensors as parameters or buffers, not as computed tensors in plain"
            " attributes, and no group of ranks, lock or open file."
        )
        raise ModelError(msg) from error
    if not structure.training:
        # from_pretrained hands out models in evaluation mode; a loop would call train().
        structure.train()
    names = {id(param): name for name, param in module.named_parameters()}
    every = module.named_parameters(remove_duplicate=False)
    persistent = set(module.state_dict(keep_vars=True))
    return Skeleton(
        module=structure,
        trainable=tuple(n for n, p in module.named_parameters() if p.requires_grad),
        aliases={name: names[id(p)] for name, p in every if name != names[id(p)]},
        persistent=frozenset(n for n, _ in module.named_buffers() if n in persistent),
    )


def _uncopyable(module: nn.Module, memo: Mapping[int, Any]) -> Iterator[str]:
    """Yield the attributes of a module and its submodules that cannot be copied."""
    for name, submodule in module.named_modules():
        for attribute, value in vars(submodule).items():
            if isinstance(value, dict) and attribute.startswith("_"):
                continue  # torch's tables
            try:
                copy.deepcopy(value, dict(memo))
            except (RuntimeError, TypeError):
                yield f" for its {'.'.join(filter(None, (name, attribute)))!r}"


def check_params(
    params: Mapping[str, torch.Tensor],
    current: Mapping[str, torch.Tensor],
    aliases: Mapping[str, str],
) -> None:
    """Raise unless new parameters can replace the current parameters.

    Args:
        params: the new parameters by name; tied parameters may have several names.
        current: the current parameters.
        aliases: first names of tied parameters, by further names.

    Raises:
        StateError: names, shapes, dtypes or devices differ, or the values of a tied parameter.
    """
    if not isinstance(params, Mapping):
        msg = (
            f"with_params: got {type(params).__name__}; expected tensors by name, such as"
            " state.params, or dict(model.named_parameters())."
        )
        raise StateError(msg)
    missing, extra = current.keys() - params.keys(), params.keys() - current.keys()
    extra -= aliases.keys()
    if missing or extra:
        msg = f"with_params: missing {sorted(missing)}, unknown {sorted(extra)}."
        raise StateError(msg)
    for name, tensor in current.items():
        new = params[name]
        if not isinstance(new, torch.Tensor):
            msg = f"with_params: {name!r} is {type(new).__name__}, not a tensor."
            raise StateError(msg)
        want = (tuple(tensor.shape), tensor.dtype, tensor.device)
        have = (tuple(new.shape), new.dtype, new.device)
        if want != have:
            msg = f"with_params: {name!r} is {have}, the model's is {want}."
            raise StateError(msg)
    for name in aliases.keys() & params.keys():
        one, two = params[aliases[name]], params[name]
        if one is not two and not torch.equal(one, two):
            msg = f"with_params: {name!r} is tied to {aliases[name]!r}, and has other values."
            raise StateError(msg)


def parameter_like(param: torch.Tensor, data: torch.Tensor) -> nn.Parameter:
    """Create a parameter from data, with another parameter's attributes and requires_grad."""
    new = nn.Parameter(data.detach(), requires_grad=param.requires_grad)
    vars(new).update(vars(param))
    return new


def give_away(module: nn.Module, name: str) -> None:
    """Give a state ownership of a module's tensors, and seal the module.

    A parameter that the user kept becomes empty, because it would follow the training. A
    submodule without tensors, such as an activation, stays usable.
    """
    for param in module.parameters():
        _GIVEN[param] = True
        param.data = torch.empty(0, dtype=param.dtype, device=param.device)
    parts = [m for m in module.modules() if [*m.parameters(), *m.buffers()]]
    for part in parts:
        _seal(part, _GivenModel, name)


def _check(module: nn.Module) -> None:
    """Raise for parameters that cannot be trained; the error names them."""
    params = dict(module.named_parameters())
    foreign = [name for name, param in params.items() if param in _GIVEN]
    with_hooks = [
        name
        for name, param in params.items()
        if param._backward_hooks  # pyright: ignore[reportPrivateUsage]
        or getattr(param, "_post_accumulate_grad_hooks", None)
    ]
    named = [*params.items(), *module.named_buffers()]
    lazy = [name for name, tensor in named if is_lazy(tensor)]
    hooks = (
        "A state trains copies without these hooks. Change gradients in a transform that has"
        " `grads`; hooks of modules stay."
    )
    for names, kind, advice in (
        (foreign, "parameters that are another state's already", _NEW_MODEL),
        (with_hooks, "parameters with hooks", hooks),
        (
            lazy,
            "lazy parameters without a shape yet",
            "Call it once on an example before.",
        ),
    ):
        if names:
            sample = ", ".join(names[:5])
            msg = f"{type(module).__name__} has {len(names)} {kind}: {sample}. {advice}"
            raise ModelError(msg)
    if not any(param.requires_grad for param in module.parameters()):
        count = sum(1 for _ in module.parameters())
        msg = (
            f"{type(module).__name__} has no trainable parameter ({count} parameters in"
            " all). Set requires_grad_(True) on those to train."
        )
        raise ModelError(msg)


# Running factories without memory for parameters: each registered parameter moves to meta.


Moved: TypeAlias = Callable[[nn.Parameter, nn.Parameter], object]
"""A function of a registered parameter and its replacement on the meta device."""


@contextmanager
def parameters_on_meta(on_move: Moved | None = None) -> Generator[None]:
    """Move each parameter that this thread's modules register to the meta device.

    Most modules register a parameter before they write values, so the parameter costs nothing.

    Args:
        on_move: called with each parameter before its values are gone.

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
                f"{type(module).__name__} has lazy parameters without a shape before a first"
                f" call: {name}. Write its sizes, as nn.Linear(in_features, out_features)."
            )
            raise ModelError(msg)
        if param not in copies:  # a tied parameter stays one tensor
            empty = nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)
            vars(empty).update(vars(param))
            copies[param] = empty
            if on_move is not None:
                on_move(param, empty)
        return copies[param]

    hook = cast("Callable[..., None]", move_param)  # torch's type lacks the parameter
    handle = register_module_parameter_registration_hook(hook)
    try:
        yield
    finally:
        handle.remove()
