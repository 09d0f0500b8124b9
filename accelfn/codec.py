# SPDX-License-Identifier: Apache-2.0
"""A tree of tensors and plain data as JSON beside a flat table of tensors, and back.

What is saved, and what travels between ranks, is this: safetensors whose metadata is JSON. No
pickle, in or out.
"""

import json
import math
from collections.abc import Mapping
from typing import Any, cast

import safetensors.torch
import torch

from accelfn.errors import PlainDataError

_DTYPES = frozenset(
    getattr(torch, name)
    for name in (
        *("float64", "float32", "float16", "bfloat16", "complex64", "bool"),
        *("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8"),
        *("float8_e4m3fn", "float8_e5m2"),
    )
)
_PLAIN = (str, int, bool, type(None))


def to_bytes(tree: Any, *, path: str = "value") -> bytes:
    """Return the tree as the bytes of a safetensors file.

    Raises:
        PlainDataError: something is neither a tensor nor plain data.
    """
    tensors: dict[str, torch.Tensor] = {}
    return pack(encode(tree, tensors, path=path), tensors)


def from_bytes(data: bytes, device: str = "cpu") -> Any:
    """Return the tree that `to_bytes` was given."""
    coded, tensors = unpack(data, device)
    return decode(coded, tensors)


def pack(coded: Any, tensors: Mapping[str, torch.Tensor]) -> bytes:
    """Return JSON data and a table of tensors as the bytes of a safetensors file."""
    # copies: safetensors refuses tensors that share memory, as views of one storage do
    dense = {
        key: tensor.detach().cpu().contiguous().clone()
        for key, tensor in tensors.items()
    }
    return safetensors.torch.save(dense, metadata={"state": json.dumps(coded)})


def unpack(data: bytes, device: str = "cpu") -> tuple[Any, dict[str, torch.Tensor]]:
    """Return what `pack` was given."""
    tensors = {
        key: tensor.to(device) for key, tensor in safetensors.torch.load(data).items()
    }
    # the header of a safetensors file: its length in 8 bytes, then JSON
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return json.loads(header["__metadata__"]["state"]), tensors


def encode(tree: Any, tensors: dict[str, torch.Tensor], *, path: str = "state") -> Any:
    """Return the tree as JSON data; its tensors are put into `tensors` under short keys.

    Raises:
        PlainDataError: something is neither a tensor nor plain data.
    """
    if isinstance(tree, torch.Tensor):
        return {"tensor": _stored(tree, tensors, path)}
    if type(tree) in _PLAIN:
        return tree
    if isinstance(tree, float):
        return tree if math.isfinite(tree) else {"float": repr(tree)}
    if isinstance(tree, Mapping):
        items = cast("Mapping[Any, Any]", tree)
        for key in items:
            if not isinstance(key, str):
                msg = f"{path} has the key {key!r}; keys are saved as strings only."
                raise PlainDataError(msg)
        return {
            "dict": {
                k: encode(v, tensors, path=f"{path}.{k}") for k, v in items.items()
            }
        }
    if type(tree) in (list, tuple):
        sequence = cast("list[Any]", tree)
        coded = [
            encode(v, tensors, path=f"{path}[{i}]") for i, v in enumerate(sequence)
        ]
        return {type(tree).__name__: coded}
    msg = (
        f"{path} is a {type(tree).__name__}; only tensors, dicts, lists, tuples,"
        " strings, numbers, booleans and None are saved or sent. Give its state_dict()"
        " instead."
    )
    raise PlainDataError(msg)


def decode(coded: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Return the tree again, with tensors from the table."""
    if isinstance(coded, dict):
        ((kind, inside),) = cast("dict[str, Any]", coded).items()
        match kind:
            case "tensor":
                return tensors[inside]
            case "float":
                return float(inside)
            case "dict":
                return {key: decode(value, tensors) for key, value in inside.items()}
            case "list":
                return [decode(value, tensors) for value in inside]
            case "tuple":
                return tuple(decode(value, tensors) for value in inside)
            case _:
                msg = f"The manifest has an entry of unknown kind {kind!r}."
                raise PlainDataError(msg)
    return coded


def _stored(tensor: torch.Tensor, tensors: dict[str, torch.Tensor], path: str) -> str:
    for key, seen in tensors.items():
        if seen is tensor:
            return key
    if tensor.is_meta or tensor.layout is not torch.strided:
        msg = (
            f"{path} is a {tensor.layout} tensor on {tensor.device}; only dense tensors"
            " with values are saved."
        )
        raise PlainDataError(msg)
    if tensor.dtype not in _DTYPES:
        msg = f"{path} is a {tensor.dtype} tensor, which safetensors cannot hold."
        raise PlainDataError(msg)
    key = f"t{len(tensors):05d}"
    tensors[key] = tensor
    return key
