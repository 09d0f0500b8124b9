# SPDX-License-Identifier: Apache-2.0
"""A model's files as Hugging Face tools name them: one, or numbered shards and their index."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch

from accelfn.base import paths
from accelfn.base.arguments import is_integer
from accelfn.checkpoint import disk, files
from accelfn.checkpoint.others import reader_of
from accelfn.checkpoint.slices import Slice
from accelfn.errors import ArgumentError, CheckpointCorruptError, CheckpointError
from accelfn.weights.boxes import read_box

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"

_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([KMGT]i?)?B")
_UNITS = {"K": 1, "M": 2, "G": 3, "T": 4}
_PLAIN_NAME = re.compile(r"[^/\\:\0]+")
_PIECE = 2**18
"""How many elements are converted at once."""
_LARGEST = 100_000_000
"""Bytes of a header or an index that are read; safetensors' own limit."""


def bytes_in(size: object, where: str | None = None) -> int:
    """Return a number of bytes that is given as one, or as text: "5GB", "100MiB".

    Raises:
        ArgumentError: it is neither, or less than 1.
    """
    found = size if is_integer(size) else 0
    match = _SIZE.fullmatch(size) if isinstance(size, str) else None
    if match:
        unit = match[2] or ""
        base = 1024 if unit.endswith("i") else 1000
        found = int(float(match[1]) * base ** _UNITS.get(unit[:1], 0))
    if found < 1:
        where = where or f"max_shard_size={size!r}"
        msg = (
            f"{where}: expected a number of bytes, or one with its unit,"
            ' such as "5GB" or "100MiB".'
        )
        raise ArgumentError(msg)
    return found


def divided(tensors: Mapping[str, torch.Tensor], limit: int) -> dict[str, list[str]]:
    """Return which tensors each file has, in order; a larger one has a file of its own."""
    shards, open_, held = list[list[str]](), list[str](), 0
    for name, tensor in tensors.items():
        size = size_of(tensor)
        if size > limit:
            shards.append([name])
            continue
        if held + size > limit:
            shards.append(open_)
            open_, held = [], 0
        open_.append(name)
        held += size
    if open_ or not shards:
        shards.append(open_)
    if len(shards) == 1:
        return {WEIGHTS: shards[0]}
    count = len(shards)
    return {
        f"model-{number:05d}-of-{count:05d}.safetensors": names
        for number, names in enumerate(shards, 1)
    }


def size_of(tensor: torch.Tensor) -> int:
    """Return how many bytes a tensor's values have."""
    return tensor.numel() * tensor.dtype.itemsize


def index_of(
    plan: Mapping[str, Sequence[str]], tensors: Mapping[str, torch.Tensor]
) -> bytes:
    """Return the index of several files."""
    index = {
        "metadata": {"total_size": sum(map(size_of, tensors.values()))},
        "weight_map": {name: file for file, names in plan.items() for name in names},
    }
    return json.dumps(index, indent=2).encode()


@attrs.frozen
class Shards:
    """Where a model's tensors lie.

    Attributes:
        tables: of each file, by its path.
        places: in which file a tensor is, by name; in the order in which they are to be read.
    """

    tables: Mapping[Path, files.File]
    places: Mapping[str, Path]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return dtypes and shapes, as tensors on the meta device."""
        found: dict[str, torch.Tensor] = {}
        for name, path in self.places.items():
            entry = self.tables[path].tensors[name]
            dtype = files.DTYPES[entry.dtype]
            found[name] = torch.empty(entry.shape, dtype=dtype, device="meta")
        return found

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor, in memory of its own."""
        path = self.places[name]
        return files.read(path, self.tables[path], {name}, verify=False)[name]

    def read_to(self, name: str, tensor: torch.Tensor) -> None:
        """Read a tensor into another's memory, of its shape and in one piece.

        What is of another dtype is converted piece by piece, and is never there whole.

        Raises:
            CheckpointCorruptError: the file is not there, or ends before.
        """
        path = self.places[name]
        entry = self.tables[path].tensors[name]
        dtype = files.DTYPES[entry.dtype]
        try:
            with disk.open_plain(path) as stream:
                stream.seek(entry.begin)
                if tensor.dtype == dtype:
                    files.read_into(stream, files.bytes_of(tensor))
                    return
                piece = torch.empty(min(tensor.numel(), _PIECE), dtype=dtype)
                for into in tensor.view(-1).split(_PIECE):
                    part = piece[: into.numel()]
                    files.read_into(stream, files.bytes_of(part))
                    into.copy_(part)
        except OSError as error:
            msg = f"{path} cannot be read: {error}"
            raise CheckpointCorruptError(msg) from error

    def read_box(self, name: str, box: Slice) -> torch.Tensor:
        """Return a box of a tensor, in memory of its own, of which no more is read.

        Raises:
            CheckpointCorruptError: the file is not there, or ends before.
        """
        path = self.places[name]
        entry = self.tables[path].tensors[name]
        try:
            with disk.open_plain(path) as stream:
                return read_box(stream, entry.begin, files.DTYPES[entry.dtype], box)
        except OSError as error:
            msg = f"{path} cannot be read: {error}"
            raise CheckpointCorruptError(msg) from error


def shards_at(source: Path) -> Shards:
    """Return where the tensors of a file, a folder or an index lie.

    Raises:
        CheckpointError: there are none.
        CheckpointCorruptError: a file or the index is not what it should be.
    """
    path = file_in(source, WEIGHTS, INDEX) if paths.is_directory(source) else source
    parted = path.name.endswith(".index.json")
    if parted and not path.name.endswith(".bin.index.json"):
        return _indexed(path)
    if path.suffix != ".safetensors":
        msg = (
            f"{path} is neither a .safetensors file, a folder with one, nor an index."
            f"{reader_of(path)}"
        )
        raise CheckpointError(msg)
    real, table = _table(path)
    return Shards({real: table}, dict.fromkeys(table.tensors, real))


def file_in(folder: Path, weights: str, index: str) -> Path:
    """Return a folder's file of weights, or else its index, by their names.

    Raises:
        CheckpointError: it has neither.
    """
    for name in (weights, index):
        if paths.exists(folder / name):
            return folder / name
    present = sorted(path.name for path in folder.iterdir())[:10]
    msg = (
        f"{folder} has neither {weights} nor {index}; it has"
        f" {present}.{reader_of(folder)}"
    )
    raise CheckpointError(msg)


def weight_map(path: Path, ending: str) -> dict[str, str]:
    """Return in which file beside an index each tensor is, as it says.

    Raises:
        CheckpointError: it is not there.
        CheckpointCorruptError: it is none, or names something else than files beside it.
    """
    index = _json(path, _bytes(path))
    named = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(named, dict):
        msg = f"{path} is no index: it has no weight_map from names to files."
        raise CheckpointCorruptError(msg)
    for name, file in named.items():
        plain = isinstance(file, str) and _PLAIN_NAME.fullmatch(file)
        if not plain or not file.endswith(ending):
            msg = (
                f"{path} says that {name!r} is in {file!r}, which is not the plain name of"
                f" a {ending} file beside it."
            )
            raise CheckpointCorruptError(msg)
    return named


def _indexed(path: Path) -> Shards:
    named = weight_map(path, ".safetensors")
    read = {file: _table(path.parent / file) for file in dict.fromkeys(named.values())}
    for name, file in named.items():
        if name not in read[file][1].tensors:
            msg = f"{path} says that {name!r} is in {file}, which has no such tensor."
            raise CheckpointCorruptError(msg)
    places: dict[str, Path] = {}
    for file, (real, table) in read.items():
        places |= {n: real for n in table.tensors if named.get(n, file) == file}
    return Shards(dict(read.values()), places)


def _table(path: Path) -> tuple[Path, files.File]:
    """Return a file's own path and what its header says, which fits its length.

    Hubs keep files under the names of their digests, with links to them: these are followed.
    """
    data = _bytes(path, header=True)
    header = _json(path, data)
    try:
        return path.resolve(), _file(header, 8 + len(data), path.stat().st_size)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        msg = f"{path} is no safetensors file: {error}."
        raise CheckpointCorruptError(msg) from error
    except CheckpointError as error:
        msg = f"{path}: {error}"
        raise CheckpointError(msg) from error


def _file(header: dict[str, Any], first: int, size: int) -> files.File:
    """Return what a header says, of tensors that begin at a byte and fill a file.

    Raises:
        ValueError: they do not.
        CheckpointError: a dtype is not one of torch's that are read here.
    """
    header.pop("__metadata__", None)
    for name, entry in header.items():
        if entry["dtype"] not in files.DTYPES:
            msg = f"{name!r} has the dtype {entry['dtype']!r}, which accelfn does not read."
            raise CheckpointError(msg)
    listed = sorted(header.items(), key=lambda item: item[1]["data_offsets"])
    tensors = {name: _entry(entry, first) for name, entry in listed}
    blank = {"blake3": "", "header_blake3": ""}
    file = files.File.from_plain({"size": size, **blank, "tensors": tensors})
    if min((each.begin for each in file.tensors.values()), default=first) != first:
        msg = "its tensors do not begin behind its header"
        raise ValueError(msg)
    return file


def _entry(entry: Mapping[str, Any], first: int) -> dict[str, Any]:
    begin, end = entry["data_offsets"]
    if type(begin) is not int or type(end) is not int:
        msg = f"{begin!r} and {end!r} are no offsets"
        raise ValueError(msg)
    return {
        "dtype": entry["dtype"],
        "shape": entry["shape"],
        "begin": first + begin,
        "end": first + end,
        "blake3": "",
    }


def _bytes(path: Path, *, header: bool = False) -> bytes:
    """Return a file's bytes, or those of its header, if they are not too many.

    Raises:
        CheckpointError: it is not there.
        CheckpointCorruptError: it cannot be read, or is something else.
    """
    try:
        with disk.open_plain(path.resolve()) as stream:
            size = stream.seek(0, 2)
            stream.seek(0)
            length = int.from_bytes(stream.read(8), "little") if header else size
            if length > min(size - 8 * header, _LARGEST):
                msg = (
                    f"{path} of {size} bytes would have {length} of JSON; it is cut off, or"
                    " something else."
                )
                raise CheckpointCorruptError(msg)
            return stream.read(length)
    except FileNotFoundError as error:
        msg = f"{path} is not there."
        raise CheckpointError(msg) from error
    except OSError as error:
        msg = f"{path} cannot be read: {error}"
        raise CheckpointCorruptError(msg) from error


def _json(path: Path, data: bytes) -> Any:
    try:
        return json.loads(data, object_pairs_hook=_each_once)
    except (ValueError, RecursionError) as error:
        msg = f"{path} cannot be read: {error}."
        raise CheckpointCorruptError(msg) from error


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        msg = f"the name {twice!r} comes twice"
        raise ValueError(msg)
    return found
