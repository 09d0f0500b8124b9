# SPDX-License-Identifier: Apache-2.0
"""`import_model`: load weights from safetensors files into a model."""

import math
import mmap
import os
import sys
from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, cast

import attrs
import torch
from torch import nn
from torch.nn import init
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from accelfn.base.arguments import (
    advise,
    as_path,
    call_mismatch,
    explain_call_errors,
    list_names,
)
from accelfn.base.draws import own_modes
from accelfn.base.tree import is_shard, tensor_leaves
from accelfn.checkpoint import files
from accelfn.checkpoint.files import empty
from accelfn.checkpoint.load import differences
from accelfn.errors import ArgumentError, CheckpointError, ModelError
from accelfn.model.model import parameters_on_meta
from accelfn.weights.export import Shards, open_weights

# Models without parameter values: initialisers do nothing, and reading values is an error.


_DRAWS = {name for name in dir(init) if name.strip("_") == name[:-1]}
"""Names of initialisers; libraries replace torch's functions by their own."""


class Valueless(TorchFunctionMode):
    """Skips initialisers of meta tensors, which cost 0.1 ms each in torch.

    Turns torch's errors about missing values into `ModelError`: torch's `parametrize` ignores
    some of these errors, and would build another model.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a function, unless it initializes a tensor without values.

        Raises:
            ModelError: the function needs values of a meta tensor.
        """
        del types
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "a function")
        if name in _DRAWS:
            tensor = args[0] if args else kwargs["tensor"]
            if tensor.is_meta:
                return tensor
        try:
            return func(*args, **kwargs)
        except (NotImplementedError, RuntimeError) as error:
            if any(leaf.is_meta for leaf in tensor_leaves([args, kwargs])):
                raise ModelError(_needs_values(name, error)) from error
            raise


def _needs_values(function: str, error: Exception) -> str:
    reason = str(error).splitlines()[0].rstrip(".")
    return (
        f"The model takes values of its parameters as it is built, by {function}, and in"
        f" af.empty_weights() or a factory they have no values: {reason}."
        " Build the model with values, as af.import_model(Net(), files)."
    )


# Models with parameters on meta and buffers with values.
#
# Files do not have buffers that are not persistent, such as a table of rotary angles: only the
# module's code can compute them. So a factory runs with only its parameters on meta. A model of
# Transformers that is completely on meta is built again that way from its configuration.


M = TypeVar("M", bound=nn.Module)
Source: TypeAlias = M | Callable[[], M]


@contextmanager
def empty_weights() -> Generator[None]:
    """Build modules in a `with` block whose parameters have no values.

    Each parameter moves to the meta device when a module registers it, so only one parameter
    has memory at a time. torch's initialisers skip parameters without values. Buffers keep the
    values that the module's code gives them, because files lack buffers that are not persistent,
    such as tables of rotary angles. `af.import_model` fills the parameters.

    The block affects its own thread only. A parameter in two places stays one parameter, and
    `requires_grad` does not change. Nothing in torch is patched, no effect remains after the
    block, even after an error, and you can nest blocks.

    Law: a model of such a block after `af.import_model(model, files)` has bitwise the parameters
    and buffers, ties included, of the model that wrote the files.

    Cost: the memory of one parameter, without writing to it.

    Raises:
        ModelError: a module is lazy, so its parameters have no shape; or it reads values of its
            parameters while it is built, as `parametrizations.orthogonal` does.
    """
    with parameters_on_meta(), Valueless():
        yield


def build_model(caller: str, source: Source[M]) -> M:
    """Return a given module, or build a factory's module with parameters on meta.

    Raises:
        ModelError: the source is neither, or the factory takes arguments.
    """
    if isinstance(source, nn.Module):
        return cast("M", source)
    problem = (
        f"{caller}(model={source!r}): expected a torch.nn.Module, or a factory of one"
    )
    if not callable(source):
        msg = f"{problem}."
        raise ModelError(msg)
    error = call_mismatch(source)
    if error is not None:
        name = getattr(source, "__name__", "factory")
        msg = f"{problem} that takes no argument: {error}. Write functools.partial({name}, ...)."
        raise ModelError(msg) from error
    with empty_weights():
        model = source()
    if not isinstance(model, nn.Module):
        msg = f"{problem}; it returned {type(model).__name__}."
        raise ModelError(msg)
    return model


def rebuild_buffers(
    model: nn.Module, names: Collection[str]
) -> dict[str, torch.Tensor]:
    """Compute buffers of a model on meta again, by name, if possible.

    Possible for models of Transformers, because a `config` is enough to build them.
    """
    library = sys.modules.get("transformers.modeling_utils")
    values: dict[str, torch.Tensor] = {}
    if not names or library is None:
        return values
    for prefix, part in model.named_modules():
        begin = f"{prefix}." if prefix else ""
        part_names = [n for n in names if n.startswith(begin) and n not in values]
        if part_names and isinstance(part, library.PreTrainedModel):
            kind: Any = type(part)
            with empty_weights():
                twin = kind(part.config)
            buffers = dict(cast("nn.Module", twin).named_buffers())
            values |= {
                n: buffers[k] for n in part_names if (k := n[len(begin) :]) in buffers
            }
    return {name: value for name, value in values.items() if not value.is_meta}


# Memory-mapped tensors of safetensors files: only pages that were read take memory.


@attrs.frozen(eq=False)
class Mapped:
    """A memory-mapped tensor of a file.

    Attributes:
        tensor: the tensor; the system reads its pages on access.
        file: the mapping.
        begin: the offset of the tensor's first byte.
        end: the offset after its last byte.
    """

    tensor: torch.Tensor
    file: mmap.mmap
    begin: int
    end: int

    def drop(self) -> None:
        """Release the pages of this tensor alone; the system reads them again on access."""
        first = -(-self.begin // mmap.PAGESIZE) * mmap.PAGESIZE
        last = self.end // mmap.PAGESIZE * mmap.PAGESIZE
        if last > first and hasattr(self.file, "madvise"):
            self.file.madvise(mmap.MADV_DONTNEED, first, last - first)


@attrs.frozen(eq=False)
class Maps:
    """Memory maps of files; maps a file when its first tensor is needed.

    Attributes:
        shards: the tensors in the files.
    """

    shards: Shards
    _opened: dict[Path, mmap.mmap] = attrs.field(factory=dict, init=False)

    def map_tensor(self, name: str) -> Mapped:
        """Map a tensor without reading it."""
        path = self.shards.places[name]
        entry = self.shards.tables[path].tensors[name]
        if path not in self._opened:
            with files.open_plain(path) as stream:
                # a private mapping: what is written into it never goes to the file
                file = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
            self._opened[path] = file
        file, dtype = self._opened[path], files.DTYPES[entry.dtype]
        count = math.prod(entry.shape)
        if not count:  # torch rejects an empty tensor at the end of a buffer
            values = torch.empty(entry.shape, dtype=dtype)
        else:
            flat = torch.frombuffer(file, dtype=dtype, count=count, offset=entry.begin)
            values = flat.view(entry.shape)
        return Mapped(values, file, entry.begin, entry.end)

    def read(self, name: str) -> torch.Tensor:
        """Map a tensor, or read it if the file does not align it."""
        values = self.map_tensor(name).tensor
        return values if files.is_aligned(values) else self.shards.read(name)


def map_weights(source: Path) -> Mapping[str, Mapped]:
    """Map all tensors of a file, a folder or an index, by name, without reading them."""
    maps = Maps(open_weights(source))
    return {name: maps.map_tensor(name) for name in maps.shards.places}


# Filling a model's tensors one at a time, on any device and in any dtype.


_Places: TypeAlias = dict[int, list[tuple[nn.Module, str]]]
"""Modules and attribute names, by the identity of the tensor that they hold."""


@attrs.frozen(eq=False)
class Incoming:
    """Tensors that are read one by one.

    Attributes:
        where: the name of the source in errors.
        tensors: tensors with the dtypes and shapes, by name; their values are not used.
        read: returns a tensor by name, in memory that the model then owns.
        read_to: reads a tensor by name into existing memory of any floating-point dtype; None
            if unsupported.
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
    """The device and the dtype of imported tensors.

    Attributes:
        device_map: devices by prefix of module names.
        dtype: the dtype of floating-point tensors; None: the model's dtypes.
    """

    device_map: Mapping[str, torch.device]
    dtype: torch.dtype | None

    def device(self, name: str, old: torch.Tensor) -> torch.device:
        """Return the device for a tensor of this name."""
        fitting = [prefix for prefix in self.device_map if _within(name, prefix)]
        if fitting:
            return self.device_map[max(fitting, key=len)]
        return torch.device("cpu") if old.is_meta else old.device

    def move(self, value: torch.Tensor, name: str, old: torch.Tensor) -> torch.Tensor:
        """Return a tensor on its device and in its dtype."""
        return value.to(self.device(name, old), self._dtype(value, old))

    def room(
        self, value: torch.Tensor, name: str, old: torch.Tensor
    ) -> torch.Tensor | None:
        """Return host memory to read into: the model's own if possible, or some to convert in.

        None if reading into new memory is as good.
        """
        dtype, device = self._dtype(value, old), self.device(name, old)
        if device != torch.device("cpu"):
            return None
        is_plain = not (old.is_conj() or old.is_neg() or old.is_inference())
        is_plain = is_plain and old.is_contiguous()
        if is_plain and (old.device, old.dtype) == (device, dtype):
            return old
        return None if dtype == value.dtype else empty(value.shape, dtype)

    def _dtype(self, value: torch.Tensor, old: torch.Tensor) -> torch.dtype:
        if not value.is_floating_point():
            return value.dtype
        return old.dtype if self.dtype is None else self.dtype


def placement(
    caller: str, model: nn.Module, device_map: Any, dtype: torch.dtype | None
) -> Placement:
    """Check a caller's arguments, and return the placement of tensors.

    Raises:
        ArgumentError: a prefix names no module, a device is invalid, or a dtype not floating.
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
        if not any(_within(name, prefix) for name in _named_tensors(model)):
            modules = [name for name, _ in model.named_children()]
            msg = (
                f"{caller}(device_map={{{prefix!r}: ...}}): the model has no such module."
                f" Its own are {list_names(modules)}."
            )
            raise ArgumentError(msg)
        try:
            devices[prefix] = torch.device(device)
        except (RuntimeError, TypeError) as error:
            msg = f"{caller}(device_map={{{prefix!r}: {device!r}}}): {error}"
            raise ArgumentError(msg) from error
        if devices[prefix].type == "meta":
            msg = f"{caller}(device_map={{{prefix!r}: 'meta'}}): meta tensors have no values."
            raise ArgumentError(msg)
    return Placement(device_map=devices, dtype=dtype)


def fill_model(
    call: str,
    source: Source[M],
    open_files: Callable[[], Incoming],
    *,
    device_map: Any,
    dtype: torch.dtype | None,
    strict: bool,
) -> M:
    """Return a model with the values that are read, after comparing all names and shapes.

    Args:
        call: the caller, for errors.
        source: a module, or a factory of one.
        open_files: called after the other arguments were checked.
        device_map: devices by prefix of module names.
        dtype: the dtype of floating-point tensors; None: the model's dtypes.
        strict: False only warns about names that are missing or unexpected.

    Raises:
        CheckpointError: names differ and `strict` is true, or shapes or kinds differ.
        ModelError: a tensor of the model cannot be filled.
        ArgumentError: a device, module or dtype is invalid.
    """
    model = build_model(call, source)
    place = placement(call, model, device_map, dtype)
    incoming = open_files()
    targets = _targets(model)
    empty, values = _rebuild_missing(model, targets)
    pairs = _match_targets(targets, incoming, strict=strict)
    with own_modes(torch.device("cpu")), torch.no_grad():
        _check_ties(targets, incoming, strict=strict)
        places = _places(model)
        for name in incoming.tensors:
            target = pairs.get(name)
            if target is not None:
                _give(target, incoming, name, place, places)
        for name, value in values.items():
            old = empty[name]
            _set(old, value.to(place.device(name, old)), places.get(id(old), []))
        ids = {id(tensor) for target in pairs.values() for tensor in target.tensors}
        for name, rest in _named_tensors(model).items():
            if id(rest) not in ids and not rest.is_meta and place.device_map:
                rest.data = rest.data.to(place.device(name, rest))
    return model


def _give(
    target: Target, incoming: Incoming, name: str, place: Placement, places: _Places
) -> None:
    """Fill a tensor; keeps no reference to the values, so that the next can use the memory."""
    target_name, old = target.names[0], target.tensors[0]
    room = place.room(incoming.tensors[name], target_name, old)
    if incoming.read_to is None or room is None:
        value = place.move(incoming.read(name), target_name, old)
    else:
        incoming.read_to(name, room)
        value = room
    if value is old:
        torch.autograd.graph.increment_version(old)  # as a copy does
        return
    for tensor in target.tensors:
        _set(tensor, value, places.get(id(tensor), []))


def _targets(model: nn.Module) -> list[Target]:
    """Return the tensors of a model's state dict, tied tensors once.

    Raises:
        ModelError: a tensor cannot be filled.
    """
    named = _named_tensors(model)
    for name, tensor in named.items():
        if is_lazy(tensor) or is_shard(tensor):
            kind = "a DTensor" if is_shard(tensor) else "lazy, without a shape yet"
            msg = (
                f"{name} is {kind}. Import into the model before that, or after a call."
            )
            raise ModelError(msg)
    ids = {id(tensor) for tensor in named.values()}
    groups: dict[Any, tuple[list[str], list[torch.Tensor]]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) in ids:
            names, tensors = groups.setdefault(_key(tensor), ([], []))
            names.append(name)
            if all(part is not tensor for part in tensors):
                tensors.append(tensor)
    return [Target(tuple(names), tuple(tensors)) for names, tensors in groups.values()]


def _rebuild_missing(
    model: nn.Module, targets: list[Target]
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the meta tensors outside the state dict, and values for them, by name.

    Raises:
        ModelError: a tensor would stay without values.
    """
    ids = {id(tensor) for target in targets for tensor in target.tensors}
    named = _named_tensors(model)
    empty = {n: t for n, t in named.items() if t.is_meta and id(t) not in ids}
    values = rebuild_buffers(model, empty)
    missing = [
        name
        for name, old in empty.items()
        if name not in values
        or (values[name].shape, values[name].dtype) != (old.shape, old.dtype)
    ]
    if missing:
        msg = (
            f"{list_names(missing)}: on the meta device, and not in the model's state dict, so"
            " no file has values for it. Build the model in `with af.empty_weights():`, or give"
            " a factory, as af.import_model(lambda: Net(...), ...)."
        )
        raise ModelError(msg)
    return empty, values


def _key(tensor: torch.Tensor) -> Any:
    """Return a key that is equal for tensors that share their values."""
    if tensor.is_meta or not tensor.numel():
        return id(tensor)
    layout = (tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)
    return tensor.data_ptr(), *layout


def _match_targets(
    targets: list[Target], incoming: Incoming, *, strict: bool
) -> dict[str, Target]:
    """Return the model's tensor for each incoming name.

    Raises:
        CheckpointError: names, shapes or dtypes do not fit.
    """
    inputs, current = dict(incoming.tensors), dict[str, torch.Tensor]()
    pairs: dict[str, Target] = {}
    for target in targets:
        named = [name for name in target.names if name in inputs]
        current[(named or target.names)[0]] = target.tensors[0]
        if named:
            pairs[named[0]] = target
        for name in named[1:]:
            del inputs[name]
    diff = differences(inputs, current)
    # only what is floating-point on both sides is converted
    changes = {
        name: how
        for name, how in diff.dtypes.items()
        if not (inputs[name].is_floating_point() and current[name].is_floating_point())
    }
    diff = attrs.evolve(diff, dtypes=changes)
    message = diff.describe(f"{incoming.where}: tensors", "the model's")
    if diff.shapes or diff.dtypes or (diff and strict):
        raise CheckpointError(message)
    missing = [name for name in diff.missing if current[name].is_meta]
    if missing:
        msg = (
            f"{incoming.where}: {list_names(missing)}: on the meta device, and not in the files."
            " Build the model with values, not in af.empty_weights(), so that strict=False"
            " can keep them."
        )
        raise CheckpointError(msg)
    if diff:
        advise(message)
    return pairs


def _check_ties(targets: list[Target], incoming: Incoming, *, strict: bool) -> None:
    """Reject tied tensors of the model that differ in the files; warn if not strict."""
    for target in targets:
        first, *rest = [n for n in target.names if n in incoming.tensors] or [""]
        for other in rest:
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
    places: _Places = {}
    for module in model.modules():
        for name, tensor in _direct_tensors(module):
            places.setdefault(id(tensor), []).append((module, name))
    return places


def _direct_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(recurse=False, remove_duplicate=False)
    yield from module.named_buffers(recurse=False, remove_duplicate=False)


def _set(
    old: torch.Tensor, value: torch.Tensor, places: list[tuple[nn.Module, str]]
) -> None:
    """Set a tensor's values, in its own memory if dtype and device fit."""
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


def _named_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _within(name: str, prefix: str) -> bool:
    return not prefix or name == prefix or name.startswith(f"{prefix}.")


@explain_call_errors
def import_model(
    model: Source[M],
    source: str | os.PathLike[str],
    *,
    device_map: Mapping[str, torch.device | str | int] | None = None,
    dtype: torch.dtype | None = None,
    strict: bool = True,
    mapped: bool = False,
) -> M:
    """Load the weights of safetensors files into a model, and return the model.

    Reads files of `export_model`, of `save_pretrained` in Hugging Face libraries, and of
    Accelerate's `save_model`. Without communication: each rank imports independently.

    Args:
        model: a module, which is changed. It can be on the meta device, as built under
            `with af.empty_weights():`; its tensors are then created as they are read. Or pass a
            factory, such as `lambda: Net(...)`, which runs in such a block. Tied parameters
            stay tied, under any of their names in the files.
        source: a `.safetensors` file, a folder with `model.safetensors` or with
            `model.safetensors.index.json`, or such an index.
        device_map: devices by prefix of module names, `""` for all; the longest prefix wins.
            Other modules stay where they are, or move from meta to the CPU.
        dtype: the dtype of floating-point tensors; default: the model's. Other tensors are
            never converted.
        strict: False only warns about names that are missing or unexpected.
        mapped: True memory-maps tensors that the model has on meta and that stay on the CPU in
            the files' dtype. They are read on first use, and writes go to memory of the
            process, never to the file. You may replace or remove the file, but a write into it
            changes the model, and truncating it ends the process. Tensors that are not aligned
            to 64 bytes are copied, as kernels would round differently; `export_model` aligns
            tensors, other writers mostly do not.

    Law: importing a state's `export_model` into its model or its factory gives bitwise its
    evaluation parameters and its buffers. With `mapped`, the model also computes and trains
    bitwise the same.

    Cost: reads each tensor once, large tensors with as many threads as torch computes with. At
    most one tensor exists in addition to the model, and none if the model has fitting memory.
    Conversions on the host use pieces of 2**18 elements. A factory needs memory for one
    parameter at a time. With `mapped`, nothing is read, and each written page takes memory.

    Raises:
        CheckpointError: names differ (the error gives the nearest), shapes or non-floating
            dtypes differ, a file is missing, or a tensor would stay on meta. The model is not
            changed.
        CheckpointCorruptError: a file or index is truncated, or has another format.
        ModelError: a buffer on meta is not persistent, so no file has it. (For models of
            Transformers, accelfn computes such buffers again.)
        ArgumentError: a device, module or dtype is invalid.
    """
    path = as_path("af.import_model(model, source)", source, "a file or folder")

    def open_files() -> Incoming:
        shards = open_weights(path)
        read = Maps(shards).read if mapped else shards.read
        return Incoming(str(source), shards.tensors(), read, shards.read_to)

    return fill_model(
        "af.import_model",
        model,
        open_files,
        device_map=device_map,
        dtype=dtype,
        strict=strict,
    )
