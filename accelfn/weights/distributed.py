# SPDX-License-Identifier: Apache-2.0
"""Folders of torch's distributed checkpoints (DCP), read by boxes and without running code.

A folder has `.metadata`, a pickle that says which box of which tensor lies at which bytes of
which file, and the files. torch reads that pickle as any other, which runs what it brings along;
here it is read by an unpickler that makes torch's records of tensors and nothing else.
"""

import io
import pickle
import re
from collections.abc import Collection, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO, cast

import attrs
import torch

from accelfn.checkpoint import disk
from accelfn.checkpoint.slices import Slice, assembled, tile
from accelfn.errors import CheckpointCorruptError, CheckpointError
from accelfn.weights.boxes import read_box
from accelfn.weights.pieces import Found, Piece
from accelfn.weights.torch_files import is_stored_zip

METADATA = ".metadata"
_LARGEST = 1_000_000_000
"""Bytes of metadata that are read: a thousand times what a model of today has."""
_RECORDS = "torch.distributed.checkpoint.metadata"
_KNOWN = {
    *(
        (_RECORDS, name)
        for name in (
            *("Metadata", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING"),
            *("TensorStorageMetadata", "BytesStorageMetadata"),
            *("ChunkStorageMetadata", "TensorProperties"),
        )
    ),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    *(("torch", "Size"), ("torch.serialization", "_get_layout")),
    *(("pathlib", name) for name in ("Path", "PosixPath", "PurePosixPath")),
    *(("pathlib._local", name) for name in ("Path", "PosixPath", "PurePosixPath")),
    ("collections", "OrderedDict"),
}
_FILE = re.compile(r"[^/\\:\0]+\.distcp")
_STATE = re.compile(r"(?P<prefix>(?:.*\.)?)state\.(?P<rest>.+)")


class _Records(pickle.Unpickler):
    """Makes torch's records of tensors, and calls nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a class or a dtype that such records are made of."""
        if (module, name) in _KNOWN:
            return getattr(import_module(module), name)
        found = getattr(torch, name, None) if module == "torch" else None
        if isinstance(found, torch.dtype):
            return found
        msg = f"it brings {module}.{name} along, which is none of torch's records"
        raise pickle.UnpicklingError(msg)


@attrs.frozen
class _Chunk:
    """A box of a tensor, and the bytes of a file in which torch saved it."""

    box: Slice
    path: Path
    begin: int
    length: int

    def read(self, part: Slice) -> torch.Tensor:
        """Return a part of the box, given as one of a tensor that is the box."""
        try:
            with disk.open_plain(self.path) as stream:
                window = _Window(stream, self.begin, self.length)
                meta = _loaded(window, "meta")  # what it is, and no values
                self._check(meta)
                first = getattr(meta.untyped_storage(), "_checkpoint_offset", None)
                if first is not None and meta.is_contiguous():
                    at = self.begin + first + meta.storage_offset() * meta.itemsize
                    return read_box(stream, at, meta.dtype, part)
                return part.of(_loaded(window, "cpu"))
        except CheckpointCorruptError:
            raise
        except Exception as error:  # bytes at random end in any of them
            msg = f"{self.path} cannot be read at byte {self.begin}: {error}"
            raise CheckpointCorruptError(msg) from error

    def _check(self, found: Any) -> None:
        shape = getattr(found, "shape", None)
        if shape != torch.Size(self.box.size):
            msg = (
                f"{self.path} has, at byte {self.begin}, {shape} and no tensor of"
                f" {self.box.size}."
            )
            raise CheckpointCorruptError(msg)


def _loaded(window: "_Window", device: str) -> torch.Tensor:
    is_stored_zip(cast("Any", window))
    window.seek(0)
    return torch.load(cast("Any", window), map_location=device, weights_only=True)


class _Window(io.RawIOBase):
    """Some bytes of a file, as a file of which no more is read than is asked for."""

    def __init__(self, stream: BinaryIO, begin: int, length: int) -> None:
        """Take the file, without a buffer, and where the bytes begin and how many they are."""
        super().__init__()
        self._stream, self._begin, self._length, self._at = stream, begin, length, 0

    def readable(self) -> bool:
        """Return that it can be read."""
        return True

    def seekable(self) -> bool:
        """Return that it can be read anywhere."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a place, which is not before the first byte."""
        bases = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}
        self._at = max(bases[whence] + offset, 0)
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Read into a buffer, no further than the last byte."""
        wanted = memoryview(buffer).cast("B")[: max(self._length - self._at, 0)]
        self._stream.seek(self._begin + self._at)
        count = cast("Any", self._stream).readinto(wanted)
        self._at += count
        return count


def pieces_of(folder: Path) -> tuple[dict[str, Piece], list[str]]:
    """Return a folder's tensors, and the names of what else it has.

    Raises:
        CheckpointCorruptError: the metadata are cut off, bring code along, or do not fit.
    """
    path = folder / METADATA
    try:
        with disk.open_plain(path) as stream:
            records = _Records(io.BytesIO(stream.read(_LARGEST))).load()
        tensors = cast("Mapping[str, Any]", records.state_dict_metadata)
        places = {
            (index.fqn, tuple(index.offset or ())): info
            for index, info in records.storage_data.items()
        }
        kinds = {n: type(each).__name__ for n, each in tensors.items()}
        pieces = {
            name: _piece(folder, name, tensors[name], places)
            for name, kind in kinds.items()
            if kind == "TensorStorageMetadata"
        }
    except CheckpointCorruptError:
        raise
    except Exception as error:  # bytes at random end in any of them
        msg = f"{path} is not read: {error}."
        raise CheckpointCorruptError(msg) from error
    return pieces, [name for name in kinds if name not in pieces]


def _piece(
    folder: Path,
    name: str,
    said: Any,
    places: Mapping[tuple[str, tuple[int, ...]], Any],
) -> Piece:
    shape = tuple(map(int, said.size))
    chunks = list[_Chunk]()
    for each in said.chunks:
        box = Slice(shape, tuple(each.offsets), tuple(each.sizes))
        place = places[name, box.offset]
        if place.transform_descriptors:
            msg = (
                f"{folder}: {name!r} was written through {place.transform_descriptors}."
            )
            raise CheckpointCorruptError(msg)
        if not _FILE.fullmatch(place.relative_path):
            msg = f"{folder} says that {name!r} is in {place.relative_path!r}, no file of it."
            raise CheckpointCorruptError(msg)
        path = folder / place.relative_path
        chunks.append(_Chunk(box, path, int(place.offset), int(place.length)))
    if not tile((chunk.box for chunk in chunks), shape):
        msg = f"{folder}: the boxes of {name!r} are not those of a tensor of {shape}."
        raise CheckpointCorruptError(msg)
    dtype = said.properties.dtype

    def read(box: Slice) -> torch.Tensor:
        shared = ((each, each.box.within(box)) for each in chunks)
        parts = (
            (part.inside(each.box), each.read(part)) for each, part in shared if part
        )
        return assembled(box, dtype, parts)

    return Piece(dtype, shape, read)


def found_in(
    folder: Path,
    pieces: Mapping[str, Piece],
    others: Collection[str],
    *,
    params: Collection[str],
    names: Collection[str],
    under: str | None,
) -> Found:
    """Return what there is of a training among tensors of any names.

    The model's stand under one prefix, as "model."; an optimizer's are called
    "<prefix>state.<parameter>.<entry>", as torch's `get_state_dict` calls them.

    Args:
        folder: as errors call it.
        pieces: all tensors.
        others: names of what else there is.
        params: the names of the model's parameters.
        names: those and the names of its buffers.
        under: the prefix of the model's, or None, to look for it.

    Raises:
        CheckpointError: models stand under several prefixes, and none was named.
    """
    step, pieces = _count(pieces)
    prefix = _prefix(folder, pieces, params, under)
    entries: dict[str, dict[str, Any]] = {}
    taken: set[str] = set()
    for key, param, entry in _entries(pieces, set(params)):
        entries.setdefault(param, {})[entry] = pieces[key]
        taken.add(key)
    inside = {k.removeprefix(prefix): k for k in pieces if k.startswith(prefix)}
    inside = {name: key for name, key in inside.items() if key not in taken}
    weights = {n: pieces[key] for n, key in inside.items() if n in names}
    strange = tuple(key for name, key in inside.items() if name not in names)
    seen = taken | set(inside.values())
    left = (*(key for key in pieces if key not in seen), *others)
    return Found(
        weights=weights, entries=entries, step=step, strange=strange, left=left
    )


def _count(pieces: Mapping[str, Piece]) -> tuple[int | None, dict[str, Piece]]:
    """Return how many updates were taken, where `step` says it, and the other tensors."""
    others = dict(pieces)
    said = others.get("step")
    if said is None or said.shape or said.dtype.is_floating_point:
        return None, others
    del others["step"]
    return int(said.read(Slice.whole(()))), others


def _prefix(
    folder: Path, keys: Collection[str], params: Collection[str], under: str | None
) -> str:
    """Return what stands before the names of the model that is meant."""
    if under is not None:
        return f"{under}." if under else ""
    counts: dict[str, int] = {}
    for name in params:
        for key in keys:
            if key == name or key.endswith(f".{name}"):
                before = key.removesuffix(name)
                counts[before] = counts.get(before, 0) + 1
    most = [each for each, n in counts.items() if n == max(counts.values())]
    if len(most) > 1:
        several = ", ".join(repr(each.removesuffix(".")) for each in sorted(most))
        msg = (
            f"{folder} has models under {several}. Say which is meant:"
            f" af.import_state(state, directory, under={most[0].removesuffix('.')!r})."
        )
        raise CheckpointError(msg)
    return most[0] if most else ""


def _entries(
    keys: Collection[str], params: Collection[str]
) -> Iterator[tuple[str, str, str]]:
    """Yield the keys of optimizers' entries, with parameter and entry; by the longest name."""
    for key in keys:
        match = _STATE.fullmatch(key)
        name = match["rest"] if match else ""
        while "." in name:
            name = name.rpartition(".")[0]
            if match and name in params:
                yield key, name, match["rest"].removeprefix(f"{name}.")
                break
