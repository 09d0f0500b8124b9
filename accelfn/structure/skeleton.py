# SPDX-License-Identifier: Apache-2.0
"""The model's structure without its tensors, and copies of it around given tensors.

A `Skeleton` is the module with every parameter and buffer on the meta device. `build`
copies that structure around tensors of a state, without copying the tensors.
"""

import copy
from collections import OrderedDict
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Self, TypeAlias, cast

import attrs
import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdKeyDictionary

from accelfn.base import draws
from accelfn.base.arguments import why_not
from accelfn.base.shards import is_wrapper
from accelfn.errors import ModelError, StateError
from accelfn.structure.given import refuse_given, seal_model
from accelfn.structure.overlap import refuse_overlap
from accelfn.structure.placed import refuse_placed
from accelfn.structure.wrapped import refuse_wrapped

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
        once_trained: names of the parameters that are trained, or were before they were
            frozen in mid-run.
    """

    module: nn.Module
    trainable: tuple[str, ...]
    aliases: Mapping[str, str]
    persistent: frozenset[str]
    once_trained: frozenset[str] = attrs.field(
        default=attrs.Factory(lambda self: frozenset(self.trainable), takes_self=True)
    )

    def training(self, names: Container[str]) -> Self:
        """Return the structure with other parameters trained."""
        every = (name for name, _ in self.module.named_parameters())
        trainable = tuple(name for name in every if name in names)
        once = self.once_trained.union(trainable)
        return attrs.evolve(self, trainable=trainable, once_trained=once)

    def build(
        self, params: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor]
    ) -> nn.Module:
        """Return a copy of the structure around these tensors, which are shared."""
        memo: dict[int, Any] = {}
        trained = set(self.trainable)
        for name, meta in self.module.named_parameters():
            made = parameter_like(meta, params[name])
            memo[id(meta)] = made.requires_grad_(name in trained)
        for name, meta in self.module.named_buffers():
            memo[id(meta)] = buffers[name].detach()
        # a module has a dozen tables of hooks and the like, nearly all of them empty, and a
        # deep copy of one takes as long as that of a full one
        for each in self.module.modules():
            for table in vars(each).values():
                if type(table) in _TABLES and not table:
                    memo[id(table)] = type(table)()
        return copy.deepcopy(self.module, memo)


def _check_takes_nothing(factory: Any) -> None:
    error = why_not(factory)
    if error is not None:
        msg = (
            f"model={factory!r}: expected a module, or a factory that takes no argument;"
            f" this one: {error}. functools.partial({_named(factory)}, ...) makes one of it."
        )
        raise ModelError(msg) from error


def _named(factory: Any) -> str:
    return getattr(factory, "__name__", "factory")


def materialize(
    source: ModelSource, *, seed: int, name: str, device: torch.device
) -> nn.Module:
    """Return the module of a factory, drawn from the seed, or the instance itself.

    A factory runs on the CPU, so the same seed gives the same model on every device; where
    the world's is meta, it runs there, and nothing is drawn.

    Raises:
        ModelError: it is no module, has meta tensors, nothing in it can be trained, or
            another state has its parameters.
    """
    module = source
    if not isinstance(source, nn.Module):
        check_factory(source)
        with _born_on(device), draws.seeded(draws.key(seed, name, "init"), _CPU):
            module = source()
    check_module(module, source)
    if device.type != "meta":
        check_values(cast("nn.Module", module), drawn=True)
    return _moved(cast("nn.Module", module), device)


def _born_on(device: torch.device) -> AbstractContextManager[object]:
    """Return where a factory runs: nothing has values where the world's device keeps none."""
    return device if device.type == "meta" else nullcontext()


def _moved(module: nn.Module, device: torch.device) -> nn.Module:
    """Return the module on a device, with each tensor there once, as it was here.

    `Module.to` makes a buffer of two names two, and on devices of some makes a parameter too.
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
        made: Any = table[name]
        cast("dict[str, Any]", table)[name] = first.setdefault(id(tensor), made)
    return module


def check_factory(source: object) -> None:
    """Raise unless it can be called as a model's factory is.

    Raises:
        ModelError: it cannot.
    """
    if not callable(source):
        msg = f"model={source!r}: expected a torch.nn.Module, or a factory of one."
        raise ModelError(msg)
    _check_takes_nothing(source)


def check_module(module: object, source: object) -> None:
    """Raise unless a state can be made of a module, and of what a factory gave.

    Args:
        module: that was given, or made.
        source: what made it; or the module.

    Raises:
        ModelError: it cannot.
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


def check_values(module: nn.Module, *, drawn: bool) -> None:
    """Raise unless a module's tensors have values; parameters that are not drawn yet need none.

    Raises:
        ModelError: they have not.
    """
    named = [*(module.named_parameters() if drawn else ()), *module.named_buffers()]
    meta = [name for name, tensor in named if tensor.is_meta]
    if meta:
        msg = (
            f"{len(meta)} tensors of {type(module).__name__} are on the meta device and"
            f" hold no values: {', '.join(meta[:5])}{', ...' if len(meta) > 5 else ''}."
            " Load them first (af.import_model(module, files), or module.to_empty, then"
            " load_state_dict), or draw a factory's"
            ' module by module: init="shard". What it would take needs no values:'
            " af.memory_estimate(model, setup, optimizer=...), and setup.explain(); what it"
            ' would send, too: accelfn.testing.communication(fn, device="meta").'
        )
        raise ModelError(msg)


def _check_in_one_place(module: nn.Module) -> None:
    """Refuse a model that somebody has spread over devices, with hooks that move data."""
    for name, each in module.named_modules():
        spread: Any = getattr(each, "hf_device_map", None)
        if isinstance(spread, Mapping) and len(set(spread.values())) > 1:
            where = f"its {name!r} " if name else ""
            msg = (
                f"{type(module).__name__}: {where}was spread over devices"
                f" {sorted(map(str, set(spread.values())))} by a device_map; a state has one"
                " device, its world's. Load the model without device_map."
            )
            raise ModelError(msg)


def _refuse_sparse_buffers(module: nn.Module) -> None:
    """Refuse buffers that are not dense, which no step can compare, copy or send."""
    for name, buffer in module.named_buffers():
        if buffer.layout is not torch.strided or buffer.is_nested:
            kind = "a nested tensor" if buffer.is_nested else f"{buffer.layout}"
            msg = (
                f"{type(module).__name__}: the buffer {name!r} is {kind}, and a state has"
                " dense tensors. Keep what it is made of, its indices and values say, as"
                " buffers, and make it of them in forward."
            )
            raise ModelError(msg)


def skeleton_of(module: nn.Module) -> Skeleton:
    """Return the structure of a module; the module is left as it is."""
    memo: dict[int, Any] = {}
    for name, param in module.named_parameters():
        if is_wrapper(param):
            msg = (
                f"{type(module).__name__}: {name} is a {type(param).__name__}, a tensor class"
                " whose values no checkpoint can hold. Give plain parameters; to compute in 8"
                ' bits, add af.autocast("fp8") to the setup.'
            )
            raise ModelError(msg)
        memo[id(param)] = parameter_like(param, torch.empty_like(param, device="meta"))
    for buffer in module.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    try:
        bare = copy.deepcopy(module, memo)
    except (RuntimeError, TypeError) as error:
        where = next(_uncopied(module, memo), "")
        msg = (
            f"{type(module).__name__} cannot be copied{where}: {error}. A module keeps its"
            " tensors as parameters or buffers, not as computed tensors in plain"
            " attributes, and no group of ranks, lock or open file."
        )
        raise ModelError(msg) from error
    if not bare.training:
        # from_pretrained hands out models in evaluation mode; a loop would call train().
        bare.train()
    names = {id(param): name for name, param in module.named_parameters()}
    every = module.named_parameters(remove_duplicate=False)
    persistent = set(module.state_dict(keep_vars=True))
    return Skeleton(
        module=bare,
        trainable=tuple(n for n, p in module.named_parameters() if p.requires_grad),
        aliases={name: names[id(p)] for name, p in every if name != names[id(p)]},
        persistent=frozenset(n for n, _ in module.named_buffers() if n in persistent),
    )


def _uncopied(module: nn.Module, memo: Mapping[int, Any]) -> Iterator[str]:
    """Yield the attributes of a module, and of those in it, that cannot be copied."""
    for name, each in module.named_modules():
        for attribute, value in vars(each).items():
            if isinstance(value, dict) and attribute.startswith("_"):
                continue  # torch's tables
            try:
                copy.deepcopy(value, dict(memo))
            except (RuntimeError, TypeError):
                yield f" for its {'.'.join(filter(None, (name, attribute)))!r}"


def check_params(
    given: Mapping[str, torch.Tensor],
    expected: Mapping[str, torch.Tensor],
    aliases: Mapping[str, str],
) -> None:
    """Refuse parameters that cannot stand in the place of others.

    Args:
        given: by name; a tied one may come under its further names, too.
        expected: those that they replace.
        aliases: first names of tied parameters, by further names.

    Raises:
        StateError: names, shapes, dtypes or devices differ, or values of one tied parameter.
    """
    if not isinstance(given, Mapping):
        msg = (
            f"with_params: got {type(given).__name__}; expected tensors by name, such as"
            " state.params, or dict(model.named_parameters())."
        )
        raise StateError(msg)
    missing, extra = expected.keys() - given.keys(), given.keys() - expected.keys()
    extra -= aliases.keys()
    if missing or extra:
        msg = f"with_params: missing {sorted(missing)}, unknown {sorted(extra)}."
        raise StateError(msg)
    for name, tensor in expected.items():
        new = given[name]
        if not isinstance(new, torch.Tensor):
            msg = f"with_params: {name!r} is {type(new).__name__}, not a tensor."
            raise StateError(msg)
        want = (tuple(tensor.shape), tensor.dtype, tensor.device)
        have = (tuple(new.shape), new.dtype, new.device)
        if want != have:
            msg = f"with_params: {name!r} is {have}, the model's is {want}."
            raise StateError(msg)
    for name in aliases.keys() & given.keys():
        one, two = given[aliases[name]], given[name]
        if one is not two and not torch.equal(one, two):
            msg = f"with_params: {name!r} is tied to {aliases[name]!r}, and has other values."
            raise StateError(msg)


def parameter_like(param: torch.Tensor, data: torch.Tensor) -> nn.Parameter:
    """Return a parameter of other data that is trained, and has attributes, as another's."""
    made = nn.Parameter(data.detach(), requires_grad=param.requires_grad)
    vars(made).update(vars(param))
    return made


def give_away(module: nn.Module, name: str) -> None:
    """Let a state of a name own the tensors of a module from now on, and nobody use it."""
    for param in module.parameters():
        _GIVEN[param] = True
    seal_model(module, name)


def _check(module: nn.Module) -> None:
    """Refuse what can't be trained, with names."""
    given = [name for name, param in module.named_parameters() if param in _GIVEN]
    if given:
        msg = (
            f"{type(module).__name__} has {len(given)} parameters that are another state's"
            f" already: {', '.join(given[:5])}. A step on one would change the other. Give"
            " a factory that makes new ones each time it is called (not a partial over"
            " modules), or copy.deepcopy(model) before the first."
        )
        raise ModelError(msg)
    hooked = [
        name
        for name, param in module.named_parameters()
        if param._backward_hooks  # pyright: ignore[reportPrivateUsage]
        or getattr(param, "_post_accumulate_grad_hooks", None)
    ]
    if hooked:
        msg = (
            f"{type(module).__name__} has hooks on {len(hooked)} parameters:"
            f" {', '.join(hooked[:5])}. A state trains copies of these, which would not call"
            " them. Change gradients in a transform that has `grads`; hooks of modules, as of"
            " register_forward_hook, stay."
        )
        raise ModelError(msg)
    named = [*module.named_parameters(), *module.named_buffers()]
    lazy = [name for name, tensor in named if is_lazy(tensor)]
    if lazy:
        msg = (
            f"{type(module).__name__} has lazy parameters without a shape yet:"
            f" {', '.join(lazy[:5])}. Call it once on an example before."
        )
        raise ModelError(msg)
    if not any(param.requires_grad for param in module.parameters()):
        count = sum(1 for _ in module.parameters())
        msg = (
            f"{type(module).__name__} has no trainable parameter ({count} parameters in"
            " all). Set requires_grad_(True) on what is to be trained."
        )
        raise ModelError(msg)
