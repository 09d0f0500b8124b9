# SPDX-License-Identifier: Apache-2.0
"""`import_model`: load weights from safetensors files into a module."""

import math
import mmap
import os
import sys
from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, cast

import attrs
import torch
from torch import nn
from torch.nn import init
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from accelfn.errors import ArgumentError, CheckpointError, ModelError
from accelfn.plug import arguments, draws, files, load, tree
from accelfn.plug import model as models
from accelfn.weights.device_map import is_within, named_tensors
from accelfn.weights.export import Shards, open_weights

# Build models without parameter values: initializers do nothing, and reading values raises.


_DRAWS = {name for name in dir(init) if name.strip("_") == name[:-1]}
"""The names of initializers. Names are compared, because libraries replace torch's functions."""


class Valueless(TorchFunctionMode):
    """Skips initializers of meta tensors, and raises `ModelError` if values are read.

    A skipped initializer saves 0.1 ms. torch's own errors about missing values are not enough:
    its `parametrize` ignores some of them, and would build a different model.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a function of torch, but skip it if it initializes a meta tensor.

        Raises:
            ModelError: the function reads values of a meta tensor.
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
            if not any(leaf.is_meta for leaf in tree.tensor_leaves([args, kwargs])):
                raise
            reason = str(error).splitlines()[0].rstrip(".")
            msg = (
                f"The model reads values of its parameters in {name} while it is built, but in"
                f" af.empty_weights() or a factory, parameters have no values: {reason}. Build the"
                " model with values: af.import_model(Net(), files)."
            )
            raise ModelError(msg) from error


# Build models with parameters on meta, but with real buffers.
#
# Files do not have buffers that are not persistent, such as a table of rotary angles. Only the
# module's code can compute such buffers. So a factory runs with only its parameters on meta. If
# a model of Transformers is completely on meta, accelfn builds it again from its configuration.


M = TypeVar("M", bound=nn.Module)
Source: TypeAlias = M | Callable[[], M]


@contextmanager
def empty_weights() -> Generator[None]:
    """Build modules without parameter values in a `with` block, to fill with `af.import_model`.

    Each parameter moves to the meta device when a module registers it, so at most one parameter
    needs memory at a time. torch's initializers do nothing for such parameters. Buffers have
    their real values, because files do not have buffers that are not persistent, such as tables
    of rotary angles.

    The block affects only modules of the same thread. Tied parameters remain tied, and
    `requires_grad` does not change. Nothing in torch is patched. After the block, also after an
    error, no effect remains. You can nest blocks.

    Law: after `af.import_model(model, files)`, a model from such a block has bitwise the same
    parameters, buffers and ties as the model that was saved.

    Cost: the memory of one parameter, which is not written to.

    Raises:
        ModelError: a module is lazy, so its parameters have no shape. Or a module reads values
            of its parameters while it is built, as `parametrizations.orthogonal` does.
    """
    with models.parameters_on_meta(), Valueless():
        yield


def build_model(caller: str, source: Source[M]) -> M:
    """Return a module unchanged, or call a factory with its parameters on meta.

    Args:
        caller: the name of the public function in errors.
        source: a module or a factory.

    Raises:
        ModelError: the source is neither a module nor a factory, or the factory needs arguments.
    """
    if isinstance(source, nn.Module):
        return cast("M", source)
    models.check_factory(source)
    with empty_weights():
        model = source()
    if not isinstance(model, nn.Module):
        msg = (
            f"{caller}(model={source!r}): expected a function that returns a torch.nn.Module; it"
            f" returned {type(model).__name__}."
        )
        raise ModelError(msg)
    return model


def rebuild_buffers(
    model: nn.Module, names: Collection[str]
) -> dict[str, torch.Tensor]:
    """Compute the values of buffers that are on meta, as far as possible; return them by name.

    This works for models of Transformers, because they can be built again from their `config`.
    """
    library = sys.modules.get("transformers.modeling_utils")
    values: dict[str, torch.Tensor] = {}
    if library is None:
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


# Memory-map tensors in safetensors files: only pages that are used need memory.


@attrs.frozen(eq=False)
class Mapped:
    """A memory-mapped tensor in a file.

    Attributes:
        tensor: the tensor. The system reads a page of it when the page is used.
        file: the memory map of the file.
        begin: the offset of the tensor's first byte in the file.
        end: the offset after the tensor's last byte.
    """

    tensor: torch.Tensor
    file: mmap.mmap
    begin: int
    end: int

    def drop(self) -> None:
        """Free the memory of this tensor's pages; the system reads them again when needed."""
        first = -(-self.begin // mmap.PAGESIZE) * mmap.PAGESIZE
        last = self.end // mmap.PAGESIZE * mmap.PAGESIZE
        if last > first and hasattr(self.file, "madvise"):
            self.file.madvise(mmap.MADV_DONTNEED, first, last - first)


@attrs.frozen(eq=False)
class Maps:
    """The memory maps of several files; a file is mapped when its first tensor is needed.

    Attributes:
        shards: the description of the tensors in the files.
    """

    shards: Shards
    _opened: dict[Path, mmap.mmap] = attrs.field(factory=dict, init=False)

    def map_tensor(self, name: str) -> Mapped:
        """Return a memory-mapped tensor, without reading it."""
        path, entry = self.shards.places[name]
        if path not in self._opened:
            with files.open_plain(path) as stream:
                # with ACCESS_COPY, writes to the tensor never change the file
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
        """Return a memory-mapped tensor; if it is not aligned in the file, read it instead."""
        values = self.map_tensor(name).tensor
        return values if files.is_aligned(values) else self.shards.read(name)


def map_weights(source: Path) -> Mapping[str, Mapped]:
    """Memory-map all tensors in a file, a folder or the files of an index, by name."""
    maps = Maps(open_weights(source))
    return {name: maps.map_tensor(name) for name in maps.shards.places}


# Fill the tensors of a model one at a time, on any device and in any dtype.


_Places: TypeAlias = dict[int, list[tuple[nn.Module, str]]]
"""For the `id` of each tensor, the modules that have it, and the name of the attribute."""


@attrs.frozen(eq=False)
class Incoming:
    """Saved tensors, which are read one at a time.

    Attributes:
        where: the name of the source in errors.
        tensors: tensors with the saved dtypes and shapes, by name. Their values are not used.
        read: a function of a name that returns the tensor, in new memory for the model.
        read_to: a function of a name and a tensor that reads into the tensor's memory, in any
            floating-point dtype; None if the source does not support this.
    """

    where: str
    tensors: Mapping[str, torch.Tensor]
    read: Callable[[str], torch.Tensor]
    read_to: Callable[[str, torch.Tensor], None] | None = None


@attrs.frozen(eq=False)
class Target:
    """A tensor of a model to fill, with all its names.

    Attributes:
        names: the names of the tensor in the model's state dict, in order.
        tensors: the parameter or buffer; several if they share memory.
    """

    names: list[str] = attrs.field(factory=list)
    tensors: list[torch.Tensor] = attrs.field(factory=list)


@attrs.frozen(kw_only=True)
class Placement:
    """Decides the device and the dtype of imported tensors.

    Attributes:
        device_map: the devices, by the prefix of module names.
        dtype: the dtype of floating-point tensors; None for the model's dtypes.
    """

    device_map: Mapping[str, torch.device]
    dtype: torch.dtype | None

    def device(self, name: str, old: torch.Tensor) -> torch.device:
        """Return the device for a tensor, from its name and the model's tensor."""
        fitting = [prefix for prefix in self.device_map if is_within(name, prefix)]
        if fitting:
            return self.device_map[max(fitting, key=len)]
        return torch.device("cpu") if old.is_meta else old.device

    def move(self, value: torch.Tensor, name: str, old: torch.Tensor) -> torch.Tensor:
        """Move a tensor that was read to its device, and convert it to its dtype."""
        return value.to(self.device(name, old), self._dtype(value, old))

    def room(
        self, value: torch.Tensor, name: str, old: torch.Tensor
    ) -> torch.Tensor | None:
        """Return a tensor in host memory to read into; None to read into new memory.

        Return the model's tensor if its device and dtype fit. Otherwise, if the dtype must be
        converted, return a new tensor.
        """
        dtype, device = self._dtype(value, old), self.device(name, old)
        if device != torch.device("cpu"):
            return None
        is_plain = not (old.is_conj() or old.is_neg() or old.is_inference())
        is_plain = is_plain and old.is_contiguous()
        if is_plain and (old.device, old.dtype) == (device, dtype):
            return old
        return None if dtype == value.dtype else files.empty(value.shape, dtype)

    def _dtype(self, value: torch.Tensor, old: torch.Tensor) -> torch.dtype:
        if not value.is_floating_point():
            return value.dtype
        return old.dtype if self.dtype is None else self.dtype


def placement(
    caller: str, model: nn.Module, device_map: Any, dtype: torch.dtype | None
) -> Placement:
    """Check the arguments `device_map` and `dtype` of a public function.

    Args:
        caller: the name of the public function in errors.
        model: the model to import into.
        device_map: the devices, by the prefix of module names.
        dtype: the dtype of floating-point tensors; None for the model's dtypes.

    Raises:
        ArgumentError: a prefix names no module, a device is invalid, or the dtype is not a
            floating-point dtype.
    """
    if dtype is not None and not (
        isinstance(dtype, torch.dtype) and dtype.is_floating_point
    ):
        msg = f"{caller}(dtype={dtype!r}): expected a floating-point dtype, such as torch.bfloat16."
        raise ArgumentError(msg)
    if device_map is not None and not isinstance(device_map, Mapping):
        msg = (
            f"{caller}(device_map={device_map!r}): expected a dict from module names to devices,"
            f' or {{"": {device_map!r}}} for the whole model.'
        )
        raise ArgumentError(msg)
    devices: dict[str, torch.device] = {}
    for prefix, device in (device_map or {}).items():
        if not any(is_within(name, prefix) for name in _named_tensors(model)):
            modules = [name for name, _ in model.named_children()]
            msg = (
                f"{caller}(device_map={{{prefix!r}: ...}}): the model has no module of this name."
                f" Its modules are: {arguments.list_names(modules) or 'none'}."
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
    """Compare all names and shapes, and fill a model with saved values.

    Args:
        call: the name of the public function in errors.
        source: a module, or a factory.
        open_files: returns the saved tensors; called after the other arguments were checked.
        device_map: the devices, by the prefix of module names.
        dtype: the dtype of floating-point tensors; None for the model's dtypes.
        strict: whether missing or unexpected names are an error. False only warns.

    Returns: the model.

    Raises:
        CheckpointError: names differ and `strict` is true, or shapes or dtypes do not fit.
        ModelError: a tensor of the model cannot be filled.
        ArgumentError: a device, module or dtype is invalid.
    """
    model = build_model(call, source)
    place = placement(call, model, device_map, dtype)
    incoming = open_files()
    targets = _targets(model)
    empty, values = _rebuild_missing(model, targets)
    pairs = _match_targets(targets, incoming, strict=strict)
    with draws.own_modes(torch.device("cpu")), torch.no_grad():
        _check_ties(targets, incoming, strict=strict)
        places = places_of(model)
        for name in filter(pairs.__contains__, incoming.tensors):
            _give(pairs[name], incoming, name, place, places)
        for name, value in values.items():
            old = empty[name]
            _set(old, value.to(place.device(name, old)), places)
        ids = {id(tensor) for target in pairs.values() for tensor in target.tensors}
        for name, rest in _named_tensors(model).items():
            if id(rest) not in ids and not rest.is_meta and place.device_map:
                rest.data = rest.data.to(place.device(name, rest))
    return model


def _give(
    target: Target, incoming: Incoming, name: str, place: Placement, places: _Places
) -> None:
    """Fill one tensor of the model with the saved tensor called `name`.

    No reference to the saved values remains, so their memory is free for the next tensor.
    """
    target_name, old = target.names[0], target.tensors[0]
    room = place.room(incoming.tensors[name], target_name, old)
    if incoming.read_to is None or room is None:
        value = place.move(incoming.read(name), target_name, old)
    else:
        incoming.read_to(name, room)
        value = room
    if value is old:
        # autograd must notice the new values, as after an in-place copy
        torch.autograd.graph.increment_version(old)
        return
    for tensor in target.tensors:
        _set(tensor, value, places)


def _targets(model: nn.Module) -> list[Target]:
    """Return the tensors in a model's state dict; tied tensors are one target.

    Raises:
        ModelError: a tensor cannot be filled, because it is lazy or a DTensor.
    """
    named = _named_tensors(model)
    for name, tensor in named.items():
        if is_lazy(tensor) or tree.is_shard(tensor):
            msg = f"{name} is a lazy parameter without a shape. Call the model before the import."
            if tree.is_shard(tensor):
                msg = f"{name} is a DTensor. Import the weights before you shard the model."
            raise ModelError(msg)
    ids = {id(tensor) for tensor in named.values()}
    targets: dict[Any, Target] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) in ids:
            target = targets.setdefault(_key(tensor), Target())
            target.names.append(name)
            if all(part is not tensor for part in target.tensors):
                target.tensors.append(tensor)
    return [*targets.values()]


def _rebuild_missing(
    model: nn.Module, targets: list[Target]
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Find meta tensors that are not in the state dict, and compute their values.

    Returns: these tensors, and their values, both by name.

    Raises:
        ModelError: the values of a tensor cannot be computed.
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
            f"{arguments.list_names(missing)}: on the meta device, and not in the model's state"
            " dict, so files have no values for them. Build the model in"
            " `with af.empty_weights():`, or pass a factory:"
            " af.import_model(lambda: Net(...), ...)."
        )
        raise ModelError(msg)
    return empty, values


def _key(tensor: torch.Tensor) -> Any:
    """Return a key that is equal for two tensors if they are the same memory."""
    if tensor.is_meta or not tensor.numel():
        return id(tensor)
    layout = (tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)
    return tensor.data_ptr(), *layout


def _match_targets(
    targets: list[Target], incoming: Incoming, *, strict: bool
) -> dict[str, Target]:
    """Return the model's tensor to fill for each saved name.

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
    diff = load.differences(inputs, current)
    # a dtype is converted only from floating-point to floating-point
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
            f"{incoming.where}: tensors are on the meta device, but not in the files:"
            f" {arguments.list_names(missing)}. Build the model with values, not in"
            " af.empty_weights(), so that strict=False can keep them."
        )
        raise CheckpointError(msg)
    if diff:
        arguments.advise(message)
    return pairs


def _check_ties(targets: list[Target], incoming: Incoming, *, strict: bool) -> None:
    """Raise `CheckpointError` if tied tensors of the model differ in the files.

    If `strict` is false, only warn.
    """
    for target in targets:
        first, *rest = [n for n in target.names if n in incoming.tensors] or [""]
        for other in rest:
            one, two = incoming.read(first), incoming.read(other)
            if one.dtype == two.dtype and files.bytes_of(one) == files.bytes_of(two):
                continue
            msg = (
                f"{incoming.where}: {first} and {other} are one tied tensor in the model, but two"
                " different tensors in the files. Untie them in the model, or pass strict=False"
                f" to use {first} for both."
            )
            if strict:
                raise CheckpointError(msg)
            arguments.advise(msg)


def places_of(model: nn.Module) -> _Places:
    """Return the modules that have each tensor of a model, and the names of the attributes."""
    places: _Places = {}
    for module in model.modules():
        for name, tensor in named_tensors("", module, recurse=False).items():
            places.setdefault(id(tensor), []).append((module, name))
    return places


def _set(old: torch.Tensor, value: torch.Tensor, places: _Places) -> None:
    """Set the values of a model's tensor, in its own memory if dtype and device fit.

    A tensor on meta is replaced in the modules that have it (`places`).
    """
    if not old.is_meta:
        if (old.dtype, old.device) == (value.dtype, value.device):
            old.copy_(value)
        else:
            old.data = value
        return
    is_param = isinstance(old, nn.Parameter)
    new = models.parameter_like(old, value) if is_param else value
    for module, name in places.get(id(old), []):
        setattr(module, name, new)


def _named_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


@arguments.explain_call_errors
def import_model(
    model: Source[M],
    source: str | os.PathLike[str],
    *,
    device_map: Mapping[str, torch.device | str | int] | None = None,
    dtype: torch.dtype | None = None,
    strict: bool = True,
    mapped: bool = False,
) -> M:
    """Load weights from safetensors files into a model, and return the model.

    The function reads files from `export_model`, from `save_pretrained` of Hugging Face
    libraries, and from Accelerate's `save_model`. Ranks do not communicate: each imports
    independently.

    Args:
        model: a module, which is changed. Its parameters can be on the meta device, as after
            `with af.empty_weights():`. Then they are created when they are read. Or pass a
            factory, such as `lambda: Net(...)`, which is called in such a block. Tied
            parameters remain tied, and the files can have them under any of their names.
        source: a `.safetensors` file, an index (`model.safetensors.index.json`), or a folder
            with such an index or with `model.safetensors`.
        device_map: devices by the prefix of module names, `""` for all modules. The longest
            matching prefix wins. Other modules remain on their device; from meta they move to
            the CPU.
        dtype: the dtype of floating-point tensors; by default, the model's. Other tensors are
            never converted.
        strict: whether missing or unexpected names are an error. False only warns.
        mapped: whether to memory-map tensors that are on meta in the model and remain on the
            CPU in the files' dtype. The system reads them at first use. Writes to them change
            memory of the process, and never the file. You may replace or remove the file. But
            if you write into it, the model changes, and if you truncate it, the process is
            killed. Tensors that are not aligned to 64 bytes are copied, because kernels would
            round differently. `export_model` aligns tensors, other libraries mostly do not.

    Law: if you export a state with `export_model`, and import it into its model or factory, you
    get bitwise the parameters for evaluation and the buffers. With `mapped`, the model also
    computes and trains bitwise equally.

    Cost: each tensor is read once; large tensors are read by as many threads as torch uses. In
    addition to the model, at most one tensor is in memory, and none if the model's own memory
    can be used. Conversions in host memory use pieces of 2**18 elements. A factory needs memory
    for one parameter at a time. With `mapped`, nothing is read, and each page that is written
    needs memory.

    Raises:
        CheckpointError: names differ (the message has similar names), shapes or integer dtypes
            differ, a file is missing, or a tensor would remain on meta. The model is not
            changed.
        CheckpointCorruptError: a file or index is truncated, or has another format.
        ModelError: a buffer on meta is not persistent, so files do not have it. (For models of
            Transformers, accelfn computes such buffers again.)
        ArgumentError: a device, module or dtype is invalid.
    """
    path = arguments.as_path(
        "af.import_model(model, source)", source, "a file or folder"
    )

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
