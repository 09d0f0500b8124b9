# SPDX-License-Identifier: Apache-2.0
"""`import_torch_weights`: what `torch.save` wrote, the one place where pickle is read.

It is read with `weights_only=True`, by an unpickler that makes tensors and plain data and
calls nothing else.
"""

import os
import pickle
import threading
import zipfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import IO, Any, TypeVar, cast

import torch
from torch import nn

from accelfn.base import paths
from accelfn.base.arguments import as_path
from accelfn.base.calling import called
from accelfn.checkpoint.others import reader_of
from accelfn.errors import CheckpointCorruptError, CheckpointError
from accelfn.weights.empty import Source, built
from accelfn.weights.placing import Incoming, fill, placement
from accelfn.weights.shards import file_in, weight_map

M = TypeVar("M", bound=nn.Module)
WEIGHTS = "pytorch_model.bin"
INDEX = "pytorch_model.bin.index.json"
_ONE = threading.Lock()
"""Whoever holds it reads: torch keeps what may stand for a class once a process."""


@called
def import_torch_weights(
    model: Source[M],
    file: str | os.PathLike[str],
    *,
    device_map: Mapping[str, torch.device | str | int] | None = None,
    dtype: torch.dtype | None = None,
    strict: bool = True,
) -> M:
    """Give a model the weights that `torch.save(model.state_dict(), file)` wrote; return it.

    Args:
        model: is changed; it may be on the meta device. Or a factory, as for `import_model`.
        file: holds a state dict and nothing else, such as `pytorch_model.bin`. Or a folder
            with one, or with `pytorch_model.bin.index.json` and the files that it names; or
            such an index. All is read with `weights_only=True`, which runs no code of whoever
            wrote it.
        device_map: as for `import_model`; so are `dtype` and `strict`.
        dtype: of the floating-point tensors; default the model's own.
        strict: False only warns about names that are missing or unexpected.

    Law: what it does is what `import_model` does to the same tensors in a safetensors file.

    Cost: the file is mapped: what was read of it counts as this process's memory, and the
    system takes it back where memory is short. A file of torch before 1.6 is read as a whole.

    Raises:
        CheckpointError: it holds more than tensors by name, or does not fit the model.
        CheckpointCorruptError: it is cut off, or something else; an index names what is not
            there.
        ModelError, ArgumentError: as `import_model`.
    """
    path = as_path("af.import_torch_weights(model, file)", file, "a file or folder")
    module = built("af.import_torch_weights", model)
    place = placement("af.import_torch_weights", module, device_map, dtype)
    held = state_dict_of(path)
    incoming = Incoming(str(file), held, lambda name: _dense(held[name]))
    fill(module, incoming, place, strict=strict)
    return module


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy in memory of its own; a file that is mapped may change."""
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def state_dict_of(path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a file, a folder or an index, by name.

    Raises:
        CheckpointError: there are none, or other things too.
        CheckpointCorruptError: a file or the index is not what it should be.
    """
    path = file_in(path, WEIGHTS, INDEX) if paths.is_directory(path) else path
    if path.name.endswith((".safetensors", ".safetensors.index.json")):
        msg = f"{path} is nothing that torch.save wrote.{reader_of(path)}"
        raise CheckpointError(msg)
    if not path.name.endswith(".index.json"):
        return _of_file(path)
    places = weight_map(path, ".bin")
    held = {
        file: _of_file(path.parent / file) for file in dict.fromkeys(places.values())
    }
    for name, file in places.items():
        if name not in held[file]:
            msg = f"{path} says that {name!r} is in {file}, which has no such tensor."
            raise CheckpointCorruptError(msg)
    found: dict[str, torch.Tensor] = {}
    for file, tensors in held.items():
        found |= {n: t for n, t in tensors.items() if places.get(n, file) == file}
    return found


class _Shut:
    """Stands for an object whose class is not there: it takes what a file says of it."""

    def __init__(self, *said: object) -> None:
        """Take what the object's class would be called with, and leave it."""


def loaded(file: Path, advice: str, *, shut: Collection[str] = ()) -> Any:
    """Return what `torch.save` wrote, if it is tensors and plain data.

    Args:
        file: to be read.
        advice: a sentence, for one that brings along what is not read.
        shut: names of classes, of whose objects the file may speak; they are neither imported
            nor called, and something that does nothing stands for each object.

    Raises:
        CheckpointError: it holds something else, or is not there.
        CheckpointCorruptError: it is not what it should be.
    """
    stands = torch.serialization.safe_globals([(_Shut, name) for name in shut])
    try:
        with file.open("rb") as stream:
            mapped = is_stored_zip(stream)
        with _ONE, stands:
            return torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
    except FileNotFoundError as error:
        msg = f"{file} is not there."
        raise CheckpointError(msg) from error
    except pickle.UnpicklingError as error:
        brought = ", ".join(_brought(file) - {*shut})
        msg = (
            f"{file} holds more than tensors by name, or is no file of torch.save: it is not"
            f" read, for that would run code that it brings along{brought and f': {brought}'}."
            f" {advice}"
        )
        raise CheckpointError(msg) from error
    except Exception as error:  # bytes at random end in any of them
        msg = f"{file} cannot be read: {error}"
        raise CheckpointCorruptError(msg) from error


def is_stored_zip(stream: IO[bytes]) -> bool:
    """Return whether torch reads a file as a zip.

    Raises:
        ValueError: it has compressed parts. torch writes none, and 1 MB could hold gigabytes.
    """
    stream.seek(0)
    if stream.read(4) != b"PK\3\4":
        return False
    for part in zipfile.ZipFile(stream).infolist():
        if part.compress_type != zipfile.ZIP_STORED:
            name = part.filename[:80]
            msg = f"{name!r} in it is compressed, as torch.save never writes it"
            raise ValueError(msg)
    return True


def _brought(file: Path) -> set[str]:
    """Return the names of what a file has that torch would not make, as far as it is read."""
    try:
        return {*torch.serialization.get_unsafe_globals_in_checkpoint(file)}
    except Exception:  # noqa: BLE001 - it has been refused already
        return set()


def _of_file(file: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a file by name."""
    held = loaded(file, "Save model.state_dict() alone.")
    if not isinstance(held, Mapping):
        msg = f"{file} holds a {type(held).__name__}; expected a state dict."
        raise CheckpointError(msg)
    tensors = cast("Mapping[Any, Any]", held)
    for name, value in tensors.items():
        if not isinstance(name, str) or not _is_dense(value):
            kind = value.layout if isinstance(value, torch.Tensor) else type(value)
            msg = (
                f"{file}: {name!r} is no dense tensor with a name, but {kind}. Save"
                " model.state_dict() alone."
            )
            raise CheckpointError(msg)
    return dict(tensors)


def _is_dense(value: object) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.layout is torch.strided
        and not value.is_quantized
        and not value.is_meta
    )
