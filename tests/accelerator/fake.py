# SPDX-License-Identifier: Apache-2.0
"""A device named "fake" on memory of the host, for machines that have no other.

Its tensors are torch's, of the key PrivateUse1: autograd, dispatch and DistributedDataParallel
treat them as those of any accelerator that comes as a package, and backward passes run in a
thread of the device's own. Each operation is carried out by the CPU on the same memory. It
refuses operands of two devices, and memory that two streams have without a wait; it has a random
generator of its own, and notes each time that the host waits for it: values that are read, copies,
shapes that depend on values.
"""

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_param_group
from torch.utils import _pytree as pytree
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from tests.accelerator import meter, races, streams
from tests.internals import devices

NAME = "fake"
_CPU, _EXTENSION = 1, 12
"""Kinds of devices in DLPack, whose extension is PrivateUse1 to torch."""
_AS_THE_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_CAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)
_LIBRARIES = [torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")]
_OURS = str(Path(__file__).parents[2] / "accelfn")
_READS = {"_local_scalar_dense", "equal", "nonzero", "masked_select", "_unique2"}
"""Operations whose results the host must have before it goes on."""
_LOW = ("addmm", "baddbmm", "bmm", "linear", "matmul", "mm", "conv1d", "conv2d")
_WIDE = ("mse_loss", "nll_loss", "binary_cross_entropy")
"""What autocast runs in few bits, and in many, as on the CPU."""
_DATA = torch._C.TensorBase.data
_waits: list[list[str]] = []


_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype = ctypes.c_void_p
_pointer.argtypes = (ctypes.py_object, ctypes.c_char_p)


def _carried(tensor: torch.Tensor, device: int) -> torch.Tensor:
    """Return a tensor of the same memory on another device."""
    capsule = torch._C._to_dlpack(tensor.detach())
    head = meter.Tensor.from_address(_pointer(capsule, b"dltensor"))
    head.device, head.index = device, 0
    if device == _EXTENSION:
        meter.take(head, tensor)
    return torch._C._from_dlpack(capsule)


def on_host(value: Any) -> Any:
    """Return the device's memory as a tensor of the host; one without any can be given some."""
    if not isinstance(value, torch.Tensor) or value.device.type != NAME:
        return value
    empty = value.numel() == 0
    return torch.empty_like(value, device="cpu") if empty else _carried(value, _CPU)


def on_device(value: Any) -> Any:
    """Return the host's memory as a tensor of the device."""
    is_hosts = isinstance(value, torch.Tensor) and value.is_cpu
    return _carried(value, _EXTENSION) if is_hosts else value


class Module:
    """What stands as `torch.fake`."""

    default_generators = (torch.Generator(),)
    _initialized = True
    device = staticmethod(nullcontext)
    Stream, Event = streams.Stream, streams.Event
    stream = staticmethod(streams.on)
    current_stream = staticmethod(streams.current)
    synchronize = staticmethod(streams.synchronize)

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def init(self) -> None:
        pass

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def get_device_name(self, _: Any = None) -> str:
        return "a device on memory of the host"

    def max_memory_allocated(self, _: Any = None) -> int:
        return 1 << 20

    def empty_cache(self) -> None:
        pass

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        self.default_generators[0].manual_seed(seed)

    def get_rng_state(self, _: Any = None) -> torch.Tensor:
        return self.default_generators[0].get_state()

    def set_rng_state(self, state: torch.Tensor, _: Any = None) -> None:
        self.default_generators[0].set_state(state)


def install() -> None:
    """Let torch have the device, for as long as this process lives."""
    _setup_privateuseone_for_python_backend(rename=NAME, backend_module=Module())
    every, aten = _LIBRARIES
    every.fallback(_carry_out, "PrivateUse1")
    every.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    aten.impl("_copy_from", _copy_from, "PrivateUse1")
    aten.impl("_copy_from_and_resize", _copy_from, "PrivateUse1")
    aten.impl("_to_copy", _to_copy, "PrivateUse1")
    aten.impl("record_stream", _nothing, "PrivateUse1")
    for name in (*_LOW, *_WIDE):
        aten.impl(name, _cast(name), "AutocastPrivateUse1")
    # torch gives Python no way to say how memory is pinned: all of the host's is here
    devices.can_pin = lambda device: device.type == NAME
    torch.empty = _unpinned(torch.empty)
    torch.Tensor.pin_memory = lambda tensor: tensor
    torch.Tensor.is_pinned = lambda tensor: tensor.is_cpu
    torch.Event = streams.Event
    torch.Tensor.data = property(_DATA.__get__, _set_data)
    # nor a way to give memory back: what FSDP has gathered stays, and is not counted
    _fsdp_param.free_storage = meter.give_back
    _fsdp_param.alloc_storage = _fsdp_param_group.alloc_storage = meter.have_again


def _set_data(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Let a tensor be of another device, as torch lets those of its own devices."""
    if NAME in (kinds := {tensor.device.type, value.device.type}) and len(kinds) > 1:
        new = value.detach().requires_grad_(tensor.requires_grad)
        torch._C._swap_tensor_impl(tensor, new)
    else:
        _DATA.__set__(tensor, value)


def _nothing(*_: Any) -> None: ...


def _unpinned(make: Any) -> Any:
    return lambda *size, **given: make(*size, **{**given, "pin_memory": False})


def _carry_out(op: Any, *args: Any, **options: Any) -> Any:
    """Carry out an operation on the CPU."""
    leaves, spec = pytree.tree_flatten((args, options))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    is_read = op._schema.name.partition("::")[2] in _READS
    if is_read:
        _note(str(op))
    _refuse_two_devices(op, tensors)
    _refuse_as_cuda_does(op, args)
    if _is_view(op):
        return op.redispatch(_AS_THE_CPU, *args, **options)
    stream = streams.current()
    races.have(stream.clock, _ours(tensors), _written(op, args, options), op)
    if is_read:
        stream.synchronize()
    hosts = {id(leaf): on_host(leaf) for leaf in tensors}
    plain = [_plain(hosts.get(id(leaf), leaf)) for leaf in leaves]
    args, options = pytree.tree_unflatten(plain, spec)
    with _own_draws(op):
        found = _fitting(op, args)(*args, **options)
    ours = {id(hosts[id(leaf)]): leaf for leaf in tensors}
    for host in [host for host in hosts.values() if id(host) in ours]:
        own = ours[id(host)]
        if (
            host.shape != own.shape
        ):  # what an operation writes may be given its shape by it
            on = on_device(host)
            torch.ops.aten.set_.source_Tensor.redispatch(_AS_THE_CPU, own, on)
    made = pytree.tree_map(lambda each: ours.get(id(each), on_device(each)), found)
    known = {id(each) for each in ours.values()}
    new = [each for each in pytree.tree_leaves(made) if id(each) not in known]
    races.make(stream.clock, _ours(new))
    return made


def _ours(leaves: Any) -> list[torch.Tensor]:
    """Return the tensors of the device."""
    return [
        leaf
        for leaf in leaves
        if isinstance(leaf, torch.Tensor) and leaf.device.type == NAME
    ]


def _written(op: Any, args: Any, options: Any) -> list[torch.Tensor]:
    """Return the device's tensors to which an operation writes."""
    kinds = op._schema.arguments
    given = dict(zip((each.name for each in kinds), args, strict=False)) | options
    named = [
        given.get(each.name)
        for each in kinds
        if each.alias_info is not None and each.alias_info.is_write
    ]
    return _ours(pytree.tree_leaves(named))


def _fitting(op: Any, args: Any) -> Any:
    """Return the operation, or all of its name where a number came in a tensor's place."""
    takes = [str(each.type) for each in op._schema.arguments]
    number = any(
        kind == "Tensor" and isinstance(arg, (int, float, complex))
        for kind, arg in zip(takes, args, strict=False)
    )
    return op.overloadpacket if number else op


def _plain(leaf: Any) -> Any:
    is_ours = isinstance(leaf, torch.device) and leaf.type == NAME
    return torch.device("cpu") if is_ours else leaf


def _is_view(op: Any) -> bool:
    name = op._schema.name
    if name in ("aten::set_", "aten::as_strided_"):
        return True
    kinds = [each.alias_info for each in op._schema.returns]
    return any(kind is not None and not kind.is_write for kind in kinds)


def _refuse_two_devices(op: Any, tensors: list[torch.Tensor]) -> None:
    """Refuse operands of two devices; a number may be the host's, and so may indices."""
    strange = {str(t.device) for t in tensors if t.ndim and t.device.type != NAME}
    if strange and not op._schema.name.startswith(("aten::index", "aten::_index")):
        msg = (
            "Expected all tensors to be on the same device, but found at least two,"
            f" {NAME}:0 and {', '.join(sorted(strange))}, in {op}"
        )
        raise RuntimeError(msg)
    if strange:
        _note(f"{op} with indices of the host")


def _refuse_as_cuda_does(op: Any, args: Any) -> None:
    """Refuse what the CPU's kernel takes and that of CUDA does not, where that was seen."""
    statistics = args[5:7] if "native_batch_norm_backward" in op._schema.name else ()
    if None in statistics:
        msg = (
            "CUDA's kernel would be given no tensor for the statistics that were saved"
        )
        raise AssertionError(msg)


@contextmanager
def _own_draws(op: Any) -> Iterator[None]:
    """Let an operation draw from the device's generator."""
    if torch.Tag.nondeterministic_seeded not in op.tags:
        yield
        return
    (own,), hosts = Module.default_generators, torch.default_generator
    before = hosts.get_state()
    hosts.set_state(own.get_state())
    try:
        yield
    finally:
        own.set_state(hosts.get_state())
        hosts.set_state(before)


def _copy_from(
    source: torch.Tensor,
    target: torch.Tensor,
    non_blocking: bool = False,  # noqa: FBT002 - torch's own schema
) -> torch.Tensor:
    """Copy between devices, or on one."""
    stream = streams.current()
    races.have(stream.clock, _ours([source]), _ours([target]), "a copy")
    if source.device == target.device:
        on_host(target).copy_(on_host(source))
        return target
    if not non_blocking:
        _note(f"a copy from {source.device.type} to {target.device.type}")
        stream.synchronize()
    on_host(target).copy_(on_host(source))
    if non_blocking and target.device.type == NAME:
        streams.send(target)
        streams.sent_from_host(source)
    elif non_blocking:
        streams.sent_to_host(target)
    return target


def _to_copy(
    source: torch.Tensor,
    *,
    non_blocking: bool = False,
    memory_format: Any = None,
    **kind: Any,
) -> torch.Tensor:
    """Return a copy of another kind; torch's own pins memory for it, in C++."""
    told = {name: each for name, each in kind.items() if each is not None}
    told.pop("pin_memory", None)
    preserved = memory_format or torch.preserve_format
    made = torch.empty_like(source, memory_format=preserved, **told)
    return made.copy_(source, non_blocking=non_blocking)


def _cast(name: str) -> Any:
    """Return an operation as autocast runs it."""
    op = getattr(torch.ops.aten, name)

    def run(*args: Any, **options: Any) -> Any:
        low = torch.get_autocast_dtype(NAME)
        dtype = low if name in _LOW else torch.float32

        def cast(leaf: Any) -> Any:
            is_float = isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
            fits = is_float and leaf.device.type == NAME
            return leaf.to(dtype) if fits and leaf.dtype != torch.float64 else leaf

        with torch._C._ExcludeDispatchKeyGuard(_CAST):
            given, named = pytree.tree_map(cast, (args, options))
            return op(*given, **named)

    return run


@contextmanager
def waits() -> Iterator[list[str]]:
    """Give the places, in accelfn, at which the host waits for the device in the block."""
    found: list[str] = []
    _waits.append(found)
    try:
        yield found
    finally:
        _waits.remove(found)


def _note(what: str) -> None:
    if _waits:
        at = place(sys._getframe(), what)
        for found in _waits:
            found.append(at)


def place(frame: Any, what: str) -> str:
    """Return the file and line of accelfn in which something is done, or that it is outside."""
    while frame is not None and not frame.f_code.co_filename.startswith(_OURS):
        frame = frame.f_back
    name = "outside" if frame is None else Path(frame.f_code.co_filename)
    at = name if frame is None else f"{name.relative_to(_OURS)}:{frame.f_lineno}"
    return f"{at}: {what}"
