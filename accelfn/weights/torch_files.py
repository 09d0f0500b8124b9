# SPDX-License-Identifier: Apache-2.0
"""Read files of `torch.save` and torch's distributed checkpoints (DCP), without running code.

A DCP folder has data files, and a pickle `.metadata` with the file and byte range of each piece
of a tensor. torch unpickles `.metadata` without restrictions, so the file could run code.
accelfn's unpickler only creates torch's records of tensors.
"""

import io
import os
import pickle
import re
import threading
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import IO, Any, BinaryIO, TypeVar, cast

import attrs
import torch
from torch import nn

from accelfn.errors import CheckpointCorruptError, CheckpointError
from accelfn.plug import arguments, files, slices, tree
from accelfn.weights import export, foreign, importing

# Files of `torch.save`. accelfn reads them with `weights_only=True`: torch's unpickler then only
# creates tensors and plain data, and calls no other function.


M = TypeVar("M", bound=nn.Module)
WEIGHTS = "pytorch_model.bin"
INDEX = "pytorch_model.bin.index.json"
_ONE = threading.Lock()
"""Lock for reading, because torch's list of allowed classes is global in the process."""


def import_torch_weights(
    model: M | Callable[[], M],
    file: str | os.PathLike[str],
    *,
    device_map: Mapping[str, torch.device | str | int] | None = None,
    dtype: torch.dtype | None = None,
    strict: bool = True,
) -> M:
    """Load weights that `torch.save(model.state_dict(), file)` wrote, and return the model.

    Args:
        model: a module, which is changed, and can be on the meta device. Or a function that
            creates the module, as for `import_model`.
        file: a file that contains only a state dict, such as `pytorch_model.bin`. Or a folder with
            such a file, or with the index `pytorch_model.bin.index.json` and its files. Or the
            index itself. accelfn reads with `weights_only=True`, so the files cannot run code.
        device_map: the device of each module, as for `import_model`.
        dtype: the dtype of floating-point tensors; default: that of the model.
        strict: whether missing and unexpected names raise an error; False only warns.

    Law: the result equals that of `import_model` from a safetensors file with the same tensors.

    Cost: the file is memory-mapped. Pages that were read count as memory of this process until
    the system needs the memory. Files from torch before 1.6 are read completely.

    Raises:
        CheckpointError: the file contains other objects than named tensors, or does not match
            the model.
        CheckpointCorruptError: a file is truncated, missing, or in another format.
        ModelError: as for `import_model`.
        ArgumentError: as for `import_model`.
    """
    path = arguments.as_path(
        "af.import_torch_weights(model, file)", file, "a file or folder"
    )

    def open_files() -> importing.Incoming:
        table = state_dict_of(path)
        # copy into new memory, because a memory-mapped file can change
        copy = partial(torch.clone, memory_format=torch.contiguous_format)
        return importing.Incoming(str(file), table, lambda n: copy(table[n].detach()))

    return importing.fill_model(
        "af.import_torch_weights",
        model,
        open_files,
        device_map=device_map,
        dtype=dtype,
        strict=strict,
    )


def state_dict_of(path: Path) -> dict[str, torch.Tensor]:
    """Read the tensors of a file, a folder or an index, by name.

    Raises:
        CheckpointError: a file contains other values than named tensors.
        CheckpointCorruptError: a file or the index is damaged.
    """
    ends = (".safetensors", ".safetensors.index.json")
    if not arguments.is_directory(path) and path.name.endswith(ends):
        msg = f"{path} is not a file of torch.save.{files.reader_of(path)}"
        raise CheckpointError(msg)
    return export.read_parts(path, WEIGHTS, INDEX, _of_file)


class _Shut:
    """A placeholder for an object in a pickle; the object's class is not imported."""

    def __init__(self, *args: object) -> None:
        """Ignore the arguments for the object's class."""


def load_plain(file: Path, advice: str, *, shut: Collection[str] = ()) -> Any:
    """Read tensors and plain data from a file that `torch.save` wrote.

    Args:
        file: the file to read.
        advice: the last sentence of the error message if the file contains other objects.
        shut: names of classes that the file may refer to. accelfn does not import or call these
            classes; placeholders replace their objects.

    Raises:
        CheckpointError: the file contains other objects, or does not exist.
        CheckpointCorruptError: the file is damaged.
    """
    export.check_exists(file)
    stands = torch.serialization.safe_globals([(_Shut, name) for name in shut])
    try:
        with file.open("rb") as stream:
            is_zip = is_stored_zip(stream)
        with _ONE, stands:
            return torch.load(file, map_location="cpu", weights_only=True, mmap=is_zip)
    except pickle.UnpicklingError as error:
        names = set[str]()
        with suppress(Exception):  # only details of an error that is raised anyway
            names |= {*torch.serialization.get_unsafe_globals_in_checkpoint(file)}
        brought = ", ".join(names - {*shut})
        msg = (
            f"{file} was not read: it contains more than tensors and plain data, or is not a file"
            " of torch.save. Reading it could run code that the file"
            f" contains{brought and f': {brought}'}. {advice}"
        )
        raise CheckpointError(msg) from error
    except Exception as error:  # a damaged file can raise any error
        msg = f"{file} cannot be read: {error}"
        raise CheckpointCorruptError(msg) from error


def is_stored_zip(stream: IO[bytes]) -> bool:
    """Return whether a file is a zip archive; check that its members are not compressed.

    Raises:
        ValueError: a member is compressed. torch never compresses, and 1 MB of compressed data
            could expand to gigabytes.
    """
    stream.seek(0)
    if stream.read(4) != b"PK\3\4":
        return False
    for part in zipfile.ZipFile(stream).infolist():
        if part.compress_type != zipfile.ZIP_STORED:
            name = part.filename[:80]
            msg = f"its part {name!r} is compressed, but torch.save never compresses"
            raise ValueError(msg)
    return True


def _of_file(file: Path) -> dict[str, torch.Tensor]:
    """Read a state dict from a file; raise if it has other values than named tensors."""
    content = load_plain(file, "Save only model.state_dict().")
    if not isinstance(content, Mapping):
        msg = f"{file} contains a {type(content).__name__}; expected a state dict."
        raise CheckpointError(msg)
    tensors = cast("Mapping[Any, Any]", content)
    for name, value in tensors.items():
        if not isinstance(name, str) or not _is_dense(value):
            is_tensor = isinstance(value, torch.Tensor)
            kind = f"{value.layout} tensor" if is_tensor else type(value).__name__
            msg = (
                f"{file}: the entry {name!r} ({kind}) is not a dense tensor, or its name is not"
                " a string. Save only the state dict: torch.save(model.state_dict(), file)."
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


METADATA = ".metadata"
_LARGEST = 1_000_000_000
"""Maximum size of `.metadata` in bytes: a thousand times the size for a large model."""
_PATHS = ("Path", "PosixPath", "PurePosixPath")
_KNOWN: Mapping[str, Collection[str]] = {
    "torch.distributed.checkpoint.metadata": (
        *("Metadata", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING"),
        *("TensorStorageMetadata", "BytesStorageMetadata"),
        *("ChunkStorageMetadata", "TensorProperties"),
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch": ("Size",),
    "torch.serialization": ("_get_layout",),
    "pathlib": _PATHS,
    "pathlib._local": _PATHS,
    "collections": ("OrderedDict",),
}
"""The classes and functions that torch's records need, by module."""
_STATE = re.compile(r"(?P<prefix>(?:.*\.)?)state\.(?P<rest>.+)")


class _Records(pickle.Unpickler):
    """An unpickler that only creates torch's records of tensors, and calls no other code."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a class, function or dtype that torch's records need; reject all others."""
        if name in _KNOWN.get(module, ()):
            return getattr(import_module(module), name)
        value = getattr(torch, name, None) if module == "torch" else None
        if isinstance(value, torch.dtype):
            return value
        msg = f"it contains {module}.{name}, which is not one of torch's tensor records"
        raise pickle.UnpicklingError(msg)


@attrs.frozen
class _Chunk:
    """A box (hyperrectangle) of a tensor's elements, and its byte range in a file."""

    box: slices.Slice
    path: Path
    begin: int
    length: int

    def read(self, part: slices.Slice) -> torch.Tensor:
        """Read a slice of the box; `part` is relative to the box."""
        with (
            export.raise_corrupt(
                f"{self.path} cannot be read at byte {self.begin}", Exception
            ),
            files.open_plain(self.path) as stream,
        ):
            window = _Window(stream, self.begin, self.length)
            meta = _load_storage(window, "meta")  # shape, dtype and offset
            shape = getattr(meta, "shape", None)
            if shape != torch.Size(self.box.size):
                msg = (
                    f"{self.path}: expected a tensor of shape {self.box.size} at byte"
                    f" {self.begin}, found {shape}."
                )
                raise CheckpointCorruptError(msg)
            first = getattr(meta.untyped_storage(), "_checkpoint_offset", None)
            if first is not None and meta.is_contiguous():
                at = self.begin + first + meta.storage_offset() * meta.itemsize
                return slices.read_box(stream, at, meta.dtype, part)
            return part.of(_load_storage(window, "cpu"))


def _load_storage(window: "_Window", device: str) -> torch.Tensor:
    is_stored_zip(cast("Any", window))
    window.seek(0)
    return torch.load(cast("Any", window), map_location=device, weights_only=True)


class _Window(io.RawIOBase):
    """A byte range of a file, as an unbuffered stream."""

    def __init__(self, stream: BinaryIO, begin: int, length: int) -> None:
        """Open a range of an unbuffered file: its first byte, and its length in bytes."""
        super().__init__()
        self._stream, self._begin, self._length, self._at = stream, begin, length, 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True: `seek` is supported."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Set and return the position; a position before the first byte becomes 0."""
        self._at = max((0, self._at, self._length)[whence] + offset, 0)
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Read bytes into a buffer, up to the end of the range; return their number."""
        view = memoryview(buffer).cast("B")[: max(self._length - self._at, 0)]
        self._stream.seek(self._begin + self._at)
        count = cast("Any", self._stream).readinto(view)
        self._at += count
        return count


def _pieces_of(folder: Path) -> tuple[dict[str, foreign.Piece], list[str]]:
    """Return the tensors of a distributed checkpoint, and the names of its other values.

    Raises:
        CheckpointCorruptError: `.metadata` is truncated, contains code, or does not match the
            files.
    """
    path = folder / METADATA
    with export.raise_corrupt(f"{path} cannot be read", Exception):
        with files.open_plain(path) as stream:
            records = _Records(io.BytesIO(stream.read(_LARGEST))).load()
        tensors = cast("Mapping[str, Any]", records.state_dict_metadata)
        places = {
            (index.fqn, tuple(index.offset or ())): info
            for index, info in records.storage_data.items()
        }
        kinds = {n: type(tensor).__name__ for n, tensor in tensors.items()}
        pieces = {
            name: _piece(folder, name, tensors[name], places)
            for name, kind in kinds.items()
            if kind == "TensorStorageMetadata"
        }
    return pieces, [name for name in kinds if name not in pieces]


def _piece(
    folder: Path,
    name: str,
    meta: Any,
    places: Mapping[tuple[str, tuple[int, ...]], Any],
) -> foreign.Piece:
    shape = tuple(map(int, meta.size))
    chunks = list[_Chunk]()
    for record in meta.chunks:
        box = slices.Slice(shape, tuple(record.offsets), tuple(record.sizes))
        place = places[name, box.offset]
        if place.transform_descriptors:
            msg = (
                f"{folder}: {name!r} was saved in a form that accelfn cannot read:"
                f" {place.transform_descriptors}."
            )
            raise CheckpointCorruptError(msg)
        file = place.relative_path
        if not (export.PLAIN_NAME.fullmatch(file) and file.endswith(".distcp")):
            msg = f"{folder}: {name!r} is in {file!r}, not a file of the folder."
            raise CheckpointCorruptError(msg)
        path = folder / file
        chunks.append(_Chunk(box, path, int(place.offset), int(place.length)))
    if not slices.cover((chunk.box for chunk in chunks), shape):
        msg = f"{folder}: the pieces of {name!r} do not cover a tensor of {shape}."
        raise CheckpointCorruptError(msg)
    dtype = meta.properties.dtype

    def read(box: slices.Slice) -> torch.Tensor:
        shared = ((chunk, chunk.box.within(box)) for chunk in chunks)
        parts = (
            (part.inside(chunk.box), chunk.read(part)) for chunk, part in shared if part
        )
        return slices.assemble(box, dtype, parts)

    return foreign.Piece(dtype, shape, read)


def found_in(
    folder: Path, parts: Iterable[Path], *, params: Collection[str], under: str | None
) -> foreign.Found:
    """Find the model's and the optimizer's tensors in distributed checkpoints.

    The names of the model's tensors have a common prefix, such as "model.". The names of the
    optimizer's tensors are "<prefix>state.<parameter>.<entry>", as in torch's `get_state_dict`.
    An integer tensor `step` is the number of updates.

    Args:
        folder: the folder that the user passed.
        parts: the folders of the distributed checkpoints: the same folder, or folders in it.
        params: the names of the model's parameters.
        under: the key of the model, without the last dot; None to find the key.

    Raises:
        CheckpointError: several keys contain a model, and `under` is None.
        CheckpointCorruptError: a `.metadata` is truncated, contains code, or does not match the
            files.
    """
    pieces, extras = dict[str, foreign.Piece](), list[str]()
    for part in parts:
        some, rest = _pieces_of(part)
        pieces |= some
        extras += rest
    count, step = pieces.get("step"), None
    if count is not None and not count.shape and not count.dtype.is_floating_point:
        step = int(pieces.pop("step").read(slices.Slice.whole(())))
    prefix = _prefix(folder, pieces, params, under)
    entries: dict[str, dict[str, Any]] = {}
    weights = {k.removeprefix(prefix): k for k in pieces if k.startswith(prefix)}
    for key, param, entry in _entries([*pieces], set(params)):
        entries.setdefault(param, {})[entry] = pieces.pop(key)
    inside = {n: pieces.pop(key) for n, key in weights.items() if key in pieces}
    return foreign.Found(
        weights=inside,
        entries=entries,
        step=step,
        prefix=prefix,
        left=(*pieces, *extras),
    )


def _prefix(
    folder: Path, keys: Collection[str], params: Collection[str], under: str | None
) -> str:
    """Return the prefix of the names that most parameters have, such as "model."."""
    if under is not None:
        return f"{under}." if under else ""
    counts = Counter(
        key.removesuffix(name)
        for name in params
        for key in keys
        if key == name or key.endswith(f".{name}")
    )
    most = [prefix for prefix, n in counts.items() if n == max(counts.values())]
    if len(most) > 1:
        several = ", ".join(repr(prefix.removesuffix(".")) for prefix in sorted(most))
        msg = (
            f"{folder} has several models, under the keys {several}. Choose one:"
            f" af.import_state(state, directory, under={most[0].removesuffix('.')!r})."
        )
        raise CheckpointError(msg)
    return most[0] if most else ""


def _entries(
    keys: Collection[str], params: Collection[str]
) -> Iterator[tuple[str, str, str]]:
    """Yield (key, parameter, entry) of each optimizer tensor.

    If several parameter names match a key, the longest is chosen.
    """
    for key in keys:
        match = _STATE.fullmatch(key)
        name = match["rest"] if match else ""
        while "." in name:
            name = name.rpartition(".")[0]
            if match and name in params:
                yield key, name, match["rest"].removeprefix(f"{name}.")
                break


# Write torch's distributed checkpoints (DCP).


def write_distributed(
    folder: Path,
    model: Mapping[str, torch.Tensor],
    opt_state: Mapping[str, Mapping[str, Any]],
    step: int,
) -> int:
    """Write a model and its optimizer's state to a folder; return the bytes of all tensors.

    Keys are those of torch's `get_state_dict`: `model.<name>`, and
    `optim.state.<parameter>.<entry>`. The key `step` is the number of updates.
    """
    # imported here because the import takes 1 s
    import torch.distributed.checkpoint as dcp  # noqa: PLC0415
    from torch.distributed.checkpoint.metadata import StorageMeta  # noqa: PLC0415

    state = {name: entry for name, entry in opt_state.items() if name in model}
    count = torch.tensor(step)
    content = {"model": dict(model), "optim": {"state": state}, "step": count}
    writer = dcp.FileSystemWriter(folder)
    # torch's default metadata would contain the folder's temporary name and a random id
    writer.storage_meta = StorageMeta
    with warnings.catch_warnings():  # torch warns about no_dist=True
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        try:
            dcp.save(content, storage_writer=writer, no_dist=True)
        except dcp.CheckpointException as error:  # wraps the real error, even Ctrl-C
            raise next(iter(error.failures.values()))[0] from error
    for path in folder.rglob("*"):
        files.flush(path)
    return sum(t.nbytes for t in tree.tensor_leaves([content["model"], state]))
