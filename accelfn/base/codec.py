# SPDX-License-Identifier: Apache-2.0
"""Encode a tree of tensors and plain data as JSON and a flat table of tensors; decode both.

Checkpoints and messages between ranks are safetensors files with JSON metadata. This module
never uses pickle.
"""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import attrs
import torch

from accelfn.base.tree import Pending
from accelfn.errors import PlainDataError

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""The dtypes that can be saved or sent, by their names in safetensors."""
_PLAIN = (str, int, bool, type(None))
MAX_DEPTH = 100
"""Maximum number of nested containers; a tree that contains itself exceeds this number."""
_MAX_BITS = 10_000
"""Maximum number of bits of an integer; Python cannot parse much longer integers."""
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-\[\]]{0,199}")


class Table(dict[str, torch.Tensor]):
    """A dict of tensors. A tensor's name is its path in the tree, if that is a plain name.

    Attributes:
        objects: whether to accept objects with `state_dict()` in the tree.
    """

    def __init__(self, *, objects: bool = False) -> None:
        """Create an empty table."""
        super().__init__()
        self.objects = objects
        self._names: dict[int, str] = {}

    def put(self, tensor: torch.Tensor, path: str) -> str:
        """Add a tensor and return its name; a tensor that was added before keeps its name.

        Raises:
            PlainDataError: a tensor of this kind cannot be saved.
        """
        _check_storable(tensor, path)
        name = self._names.get(id(tensor))
        if name is None:
            name = path
            if not _NAME.fullmatch(path) or path in self:
                name = f"<{len(self)}>"  # cannot be equal to a path
            self[name], self._names[id(tensor)] = tensor, name
        return name


def to_bytes(tree: Any, *, path: str = "value") -> bytes:
    """Return the tree as the bytes of a safetensors file.

    Raises:
        PlainDataError: a leaf is neither a tensor nor plain data.
    """
    import safetensors.torch  # noqa: PLC0415 - many programs neither send nor save objects

    tensors = Table()
    coded = encode(tree, tensors, path=path)
    # copies, because safetensors rejects tensors that share memory, such as views
    dense = {k: t.detach().cpu().contiguous().clone() for k, t in tensors.items()}
    return safetensors.torch.save(dense, metadata={"state": json.dumps(coded)})


def from_bytes(data: bytes, device: str = "cpu") -> Any:
    """Return the tree that `to_bytes` encoded."""
    import safetensors.torch  # noqa: PLC0415 - often not needed

    tensors = {k: t.to(device) for k, t in safetensors.torch.load(data).items()}
    # a safetensors file begins with the header's length in 8 bytes, then the header as JSON
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return decode(json.loads(header["__metadata__"]["state"]), tensors)


def encode(
    tree: Any, tensors: Table, *, path: str = "state", room: int = MAX_DEPTH
) -> Any:
    """Return the tree as JSON data, and add its tensors to the table.

    An object with a `state_dict()` is encoded as this dict, if the table accepts objects.
    `room` is the number of container levels that may follow.

    Raises:
        PlainDataError: a leaf is neither a tensor nor plain data.
    """
    if isinstance(tree, torch.Tensor):
        return {"tensor": tensors.put(tree, path)}
    if type(tree) in _PLAIN:
        _check_number(tree, path)
        return tree
    if isinstance(tree, float):
        return tree if math.isfinite(tree) else {"float": repr(float(tree))}
    if room == 0:
        msg = f"{path[:200]} is nested in more than {MAX_DEPTH} containers, or contains itself."
        raise PlainDataError(msg)
    if isinstance(tree, Mapping):
        return _encode_items(cast("Mapping[Any, Any]", tree), tensors, path, room - 1)
    if type(tree) in (list, tuple):
        sequence = cast("list[Any]", tree)
        values = [
            encode(v, tensors, path=f"{path}[{i}]", room=room - 1)
            for i, v in enumerate(sequence)
        ]
        return {type(tree).__name__: values}
    is_pending = isinstance(tree, Pending)
    if is_pending or (tensors.objects and has_state(tree)):
        inside = tree.wait() if is_pending else tree.state_dict()
        kind = "pending" if is_pending else "object"
        return {kind: encode(inside, tensors, path=path, room=room - 1)}
    has_state_dict = callable(getattr(tree, "state_dict", None))
    advice = "its state_dict()" if has_state_dict else "the data that you need from it"
    msg = (
        f"{path} is a {type(tree).__name__}, but only tensors, dicts, lists, tuples, strings,"
        f" numbers, booleans and None can be saved or sent. Replace it by {advice}."
    )
    raise PlainDataError(msg)


def _encode_items(
    items: Mapping[Any, Any], tensors: Table, path: str, room: int
) -> Any:
    for key in items:
        if type(key) not in (str, int):
            msg = f"{path} has the key {key!r}, but keys must be str or int. Write str(key)."
            raise PlainDataError(msg)
        _check_number(key, path)
    entries = {
        k: encode(v, tensors, path=f"{path}.{k}", room=room) for k, v in items.items()
    }
    if all(isinstance(key, str) for key in entries):
        return {"dict": entries}
    return {"pairs": [[key, value] for key, value in entries.items()]}


def has_state(value: Any) -> bool:
    """Return whether an object has `state_dict` and `load_state_dict` methods."""
    methods = (getattr(value, name, None) for name in ("state_dict", "load_state_dict"))
    return all(callable(method) for method in methods)


def tensors_in(coded: Any) -> Iterator[str]:
    """Yield the names of the tensors in an encoded tree."""
    if not isinstance(coded, dict):
        return
    ((kind, inside),) = cast("dict[str, Any]", coded).items()
    match kind:
        case "tensor":
            yield inside
            return
        case "dict":
            parts = inside.values()
        case "pairs":
            parts = [value for _, value in inside]
        case "object" | "pending":
            parts = [inside]
        case _:
            parts = [] if kind == "float" else inside
    for part in parts:
        yield from tensors_in(part)


@attrs.frozen(eq=False)
class ObjectState:
    """The result of an object's `state_dict()`; pass it to `load_state_dict` of such an object."""

    state: Any


def decode(coded: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Decode JSON data to a tree with tensors from the table; objects become `ObjectState`.

    Raises:
        PlainDataError: the data was not written by `encode`.
    """

    def inner(value: Any) -> Any:
        return decode(value, tensors)

    makers: dict[str, Callable[[Any], Any]] = {
        "tensor": lambda name: tensors[name],
        "float": float,
        "dict": lambda items: {key: inner(value) for key, value in items.items()},
        "pairs": lambda items: {key: inner(value) for key, value in items},
        "object": lambda state: ObjectState(inner(state)),
        "pending": lambda values: Pending.of(inner(values)),
        "list": lambda values: [inner(value) for value in values],
        "tuple": lambda values: tuple(inner(value) for value in values),
    }
    if not isinstance(coded, dict):
        return coded
    ((kind, inside),) = cast("dict[str, Any]", coded).items()
    if kind not in makers:
        msg = f"Data of unknown kind {kind!r}: a newer accelfn wrote it, or it is damaged."
        raise PlainDataError(msg)
    return makers[kind](inside)


def _check_number(value: Any, path: str) -> None:
    if isinstance(value, int) and value.bit_length() > _MAX_BITS:
        msg = (
            f"{path} has an integer of {value.bit_length()} bits, but at most"
            f" {_MAX_BITS} bits can be saved or sent."
        )
        raise PlainDataError(msg)


def kind_of(tensor: torch.Tensor) -> str | None:
    """Return the kind of a tensor that is not dense or has no values; None for other tensors."""
    if tensor.is_nested or tensor.is_quantized:
        return "nested" if tensor.is_nested else "quantized"
    if tensor.layout is not torch.strided:
        return str(tensor.layout).removeprefix("torch.")
    return "meta" if tensor.is_meta else None


def _check_storable(tensor: torch.Tensor, path: str) -> None:
    if kind := kind_of(tensor):
        msg = (
            f"{path} is a {kind} tensor, but only dense tensors with values can be saved or"
            " sent. Replace it by tensor.to_dense(), or by its dense parts."
        )
        raise PlainDataError(msg)
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        msg = (
            f"{path} is a {type(tensor).__name__}, but subclasses of torch.Tensor cannot be"
            " saved or sent. Replace it by the plain tensors that it consists of."
        )
        raise PlainDataError(msg)
    if tensor.numel() and not tensor.untyped_storage().nbytes():
        msg = f"{path} is a tensor without memory: its storage was freed. Replace it by None."
        raise PlainDataError(msg)
    if tensor.dtype not in DTYPES.values():
        msg = (
            f"{path} has dtype {tensor.dtype}, which safetensors files do not support. Convert"
            " it to another dtype, or a complex128 tensor with torch.view_as_real(tensor)."
        )
        raise PlainDataError(msg)
