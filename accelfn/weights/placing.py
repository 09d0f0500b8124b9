# SPDX-License-Identifier: Apache-2.0
"""Giving a model's tensors their values, one at a time, wherever and however they lie."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import attrs
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from accelfn.base import large_pages
from accelfn.base.advice import advise
from accelfn.base.contexts import own_modes
from accelfn.checkpoint import compare, files
from accelfn.checkpoint.slices import is_sharded
from accelfn.errors import ArgumentError, CheckpointError, ModelError
from accelfn.weights.empty import remade

_Places: TypeAlias = dict[int, list[tuple[nn.Module, str]]]
"""Modules, and their attributes, by the identity of the tensor that stands there."""


@attrs.frozen(eq=False)
class Incoming:
    """Tensors that can be had one by one.

    Attributes:
        where: from where, as errors say it.
        tensors: their dtypes and shapes, by name; no values are taken from these.
        read: gives one by name, in memory that is then the model's.
        read_to: reads one by name into memory that there is, of whichever floating-point dtype;
            None, if that cannot be.
    """

    where: str
    tensors: Mapping[str, torch.Tensor]
    read: Callable[[str], torch.Tensor]
    read_to: Callable[[str, torch.Tensor], None] | None = None


@attrs.frozen(eq=False)
class Target:
    """A tensor of a model, under all its names.

    Attributes:
        names: of the model's state dict, in its order.
        tensors: the parameters or buffers that share these values: mostly one.
    """

    names: tuple[str, ...]
    tensors: tuple[torch.Tensor, ...]


@attrs.frozen(kw_only=True)
class Placement:
    """Where tensors go, and as what.

    Attributes:
        device_map: device by prefix of module names.
        dtype: of floating-point tensors; None: as the model has them.
    """

    device_map: Mapping[str, torch.device]
    dtype: torch.dtype | None

    def device(self, name: str, old: torch.Tensor) -> torch.device:
        """Return on which device a tensor of this name is to be."""
        fitting = [each for each in self.device_map if _within(name, each)]
        if fitting:
            return self.device_map[max(fitting, key=len)]
        return torch.device("cpu") if old.is_meta else old.device

    def placed(self, value: torch.Tensor, name: str, old: torch.Tensor) -> torch.Tensor:
        """Return a tensor on its device and in its dtype."""
        return value.to(self.device(name, old), self._dtype(value, old))

    def has_room(self, value: torch.Tensor, name: str, old: torch.Tensor) -> bool:
        """Whether there is memory on the host that a tensor goes to, in the file's order."""
        return (
            old.device == torch.device("cpu") == self.device(name, old)
            and old.dtype == self._dtype(value, old)
            and old.is_contiguous()
            and not (old.is_conj() or old.is_neg() or old.is_inference())
        )

    def converted(
        self, value: torch.Tensor, name: str, old: torch.Tensor
    ) -> torch.Tensor | None:
        """Return memory on the host for what is to be of another dtype; None where it is not."""
        dtype, device = self._dtype(value, old), self.device(name, old)
        if dtype == value.dtype or device != torch.device("cpu"):
            return None
        return large_pages.empty(value.shape, dtype)

    def _dtype(self, value: torch.Tensor, old: torch.Tensor) -> torch.dtype:
        if not value.is_floating_point():
            return value.dtype
        return old.dtype if self.dtype is None else self.dtype


def placement(
    caller: str, model: nn.Module, device_map: Any, dtype: torch.dtype | None
) -> Placement:
    """Return where a caller's arguments say that tensors go.

    Raises:
        ArgumentError: a prefix is no module's, a device none, or a dtype not floating.
    """
    if dtype is not None and not (
        isinstance(dtype, torch.dtype) and dtype.is_floating_point
    ):
        msg = f"{caller}(dtype={dtype!r}): expected a floating-point dtype, as torch.bfloat16."
        raise ArgumentError(msg)
    if device_map is not None and not isinstance(device_map, Mapping):
        msg = (
            f"{caller}(device_map={device_map!r}): expected devices by names of modules,"
            f' or {{"": {device_map!r}}} for the whole model.'
        )
        raise ArgumentError(msg)
    devices: dict[str, torch.device] = {}
    for prefix, device in (device_map or {}).items():
        if not any(_within(name, prefix) for name in _named(model)):
            modules = [name for name, _ in model.named_children()]
            msg = (
                f"{caller}(device_map={{{prefix!r}: ...}}): the model has no such module."
                f" Its own are {compare.some(modules)}."
            )
            raise ArgumentError(msg)
        devices[prefix] = _device(caller, prefix, device)
    return Placement(device_map=devices, dtype=dtype)


def fill(
    model: nn.Module, incoming: Incoming, place: Placement, *, strict: bool
) -> None:
    """Give a model's tensors the incoming values; before the first, all is compared.

    Raises:
        CheckpointError: names differ and `strict` is true, or shapes or kinds do.
        ModelError: a tensor of the model cannot be given its values.
    """
    targets = _targets(model)
    empty, made = _remade(model, targets)
    pairs = _paired(targets, incoming, strict=strict)
    with own_modes(torch.device("cpu")), torch.no_grad():
        _check_ties(targets, incoming, strict=strict)
        places = _places(model)
        for name in incoming.tensors:
            target = pairs.get(name)
            if target is not None:
                _give(target, incoming, name, place, places)
        for name, value in made.items():
            old = empty[name]
            _set(old, value.to(place.device(name, old)), places.get(id(old), []))
        given = {id(each) for target in pairs.values() for each in target.tensors}
        for name, left in _named(model).items():
            if id(left) not in given and not left.is_meta and place.device_map:
                left.data = left.data.to(place.device(name, left))


def _give(
    target: Target, incoming: Incoming, name: str, place: Placement, places: _Places
) -> None:
    """Give a tensor its values; none of them is held when it returns, for the next to come."""
    own, old = target.names[0], target.tensors[0]
    if incoming.read_to and place.has_room(incoming.tensors[name], own, old):
        incoming.read_to(name, old)
        torch.autograd.graph.increment_version(old)  # as a copy does
        return
    room = place.converted(incoming.tensors[name], own, old)
    if incoming.read_to and room is not None:
        incoming.read_to(name, room)
        value = room
    else:
        value = place.placed(incoming.read(name), own, old)
    for each in target.tensors:
        _set(each, value, places.get(id(each), []))


def _targets(model: nn.Module) -> list[Target]:
    """Return the tensors of a model that a state dict has, tied ones once.

    Raises:
        ModelError: one cannot be given values.
    """
    named = _named(model)
    for name, tensor in named.items():
        if is_lazy(tensor) or is_sharded(tensor):
            kind = "a DTensor" if is_sharded(tensor) else "lazy, without a shape yet"
            msg = (
                f"{name} is {kind}. Import into the model before that, or after a call."
            )
            raise ModelError(msg)
    own = {id(tensor) for tensor in named.values()}
    found: dict[Any, tuple[list[str], list[torch.Tensor]]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) in own:
            names, tensors = found.setdefault(_key(tensor), ([], []))
            names.append(name)
            if all(each is not tensor for each in tensors):
                tensors.append(tensor)
    return [Target(tuple(names), tuple(tensors)) for names, tensors in found.values()]


def _remade(
    model: nn.Module, targets: list[Target]
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the tensors on meta that no file has, and values for them, by name.

    Raises:
        ModelError: one would be left without any.
    """
    saved = {id(tensor) for target in targets for tensor in target.tensors}
    named = _named(model)
    empty = {n: t for n, t in named.items() if t.is_meta and id(t) not in saved}
    made = remade(model, empty)
    left = [
        name
        for name, old in empty.items()
        if name not in made
        or (made[name].shape, made[name].dtype) != (old.shape, old.dtype)
    ]
    if left:
        msg = (
            f"{compare.some(left)}: on the meta device, and not in the model's state dict, so"
            " no file has values for it. Build the model in `with af.empty_weights():`, which"
            " makes all but the parameters, or give a factory, as"
            " af.import_model(lambda: Net(...), ...); or give it values first:"
            " module.register_buffer(name, values, persistent=False)."
        )
        raise ModelError(msg)
    return empty, made


def _key(tensor: torch.Tensor) -> Any:
    """Return what is equal for tensors that are one."""
    if tensor.is_meta or not tensor.numel():
        return id(tensor)
    layout = (tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)
    return tensor.data_ptr(), *layout


def _paired(
    targets: list[Target], incoming: Incoming, *, strict: bool
) -> dict[str, Target]:
    """Return which tensor of the model each incoming one is for.

    Raises:
        CheckpointError: they do not fit.
    """
    there, expected = dict(incoming.tensors), dict[str, torch.Tensor]()
    pairs: dict[str, Target] = {}
    for target in targets:
        named = [name for name in target.names if name in there]
        expected[(named or target.names)[0]] = target.tensors[0]
        if named:
            pairs[named[0]] = target
        for name in named[1:]:
            del there[name]
    found = compare.differences(there, expected)
    # only what is floating-point on both sides is converted
    floating = {
        name
        for name in found.dtypes
        if there[name].is_floating_point() and expected[name].is_floating_point()
    }
    found = attrs.evolve(
        found,
        dtypes={n: how for n, how in found.dtypes.items() if n not in floating},
    )
    told = found.told(f"{incoming.where}: tensors", "the model's")
    if found.shapes or found.dtypes or (found and strict):
        raise CheckpointError(told)
    _check_given(targets, pairs, incoming.where)
    if found:
        advise(told)
    return pairs


def _check_given(
    targets: list[Target], pairs: Mapping[str, Target], where: str
) -> None:
    """Refuse to leave a tensor on meta, which the files have no values for.

    Raises:
        CheckpointError: one would be.
    """
    given = {target.names for target in pairs.values()}
    left = [
        each.names[0]
        for each in targets
        if each.names not in given and each.tensors[0].is_meta
    ]
    if left:
        msg = (
            f"{where}: {compare.some(left)}: without values in the model, on the meta device,"
            " and not in the files. Build the model with values, not in"
            " af.empty_weights(), and what strict=False leaves keeps them."
        )
        raise CheckpointError(msg)


def _check_ties(targets: list[Target], incoming: Incoming, *, strict: bool) -> None:
    """Refuse what is one tensor in the model, and several that differ in the files."""
    for target in targets:
        first, *others = [n for n in target.names if n in incoming.tensors] or [""]
        for other in others:
            one, two = incoming.read(first), incoming.read(other)
            if one.dtype == two.dtype and files.bytes_of(one) == files.bytes_of(two):
                continue
            msg = (
                f"{incoming.where}: {first} and {other} are one tensor in the model, and"
                " two that differ there. Untie them in the model,"
                f" or take {first} for both with strict=False."
            )
            if strict:
                raise CheckpointError(msg)
            advise(msg)


def _places(model: nn.Module) -> _Places:
    """Return the modules and attributes that hold each tensor of a model."""
    found: _Places = {}
    for module in model.modules():
        for name, tensor in _own(module):
            found.setdefault(id(tensor), []).append((module, name))
    return found


def _own(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(recurse=False, remove_duplicate=False)
    yield from module.named_buffers(recurse=False, remove_duplicate=False)


def _set(
    old: torch.Tensor, value: torch.Tensor, places: list[tuple[nn.Module, str]]
) -> None:
    """Give a tensor its values: in its own memory where it has fitting one."""
    if not old.is_meta:
        if (old.dtype, old.device) == (value.dtype, value.device):
            old.copy_(value)
        else:
            old.data = value
        return
    new = value
    if isinstance(old, nn.Parameter):
        new = nn.Parameter(value, requires_grad=old.requires_grad)
        vars(new).update(vars(old))
    for module, name in places:
        setattr(module, name, new)


def _named(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _within(name: str, prefix: str) -> bool:
    return not prefix or name == prefix or name.startswith(f"{prefix}.")


def _device(caller: str, prefix: str, device: Any) -> torch.device:
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        msg = f"{caller}(device_map={{{prefix!r}: {device!r}}}): {error}"
        raise ArgumentError(msg) from error
    if found.type == "meta":
        msg = f"{caller}(device_map={{{prefix!r}: {device!r}}}): meta tensors have no values."
        raise ArgumentError(msg)
    return found
