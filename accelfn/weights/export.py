# SPDX-License-Identifier: Apache-2.0
"""Export a state's model as safetensors files, or its parameters as full tensors."""

import json
import os
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeVar

import attrs
import torch

from accelfn.base import arguments
from accelfn.base.arguments import as_path, explain_call_errors, is_word, parse_bytes
from accelfn.base.codec import Table
from accelfn.base.draws import own_modes
from accelfn.base.tree import is_shard
from accelfn.checkpoint import commit, files, slices
from accelfn.checkpoint.commit import Phase, Save
from accelfn.checkpoint.files import reader_of
from accelfn.checkpoint.save import exchange_of, save_of
from accelfn.checkpoint.slices import Slice
from accelfn.collectives.replicas import by_calls
from accelfn.errors import (
    ArgumentError,
    CheckpointCorruptError,
    CheckpointError,
    ModelError,
    PlainDataError,
)
from accelfn.state.state import TrainState, check_state
from accelfn.state.views import params_at
from accelfn.world import World

# File names of Hugging Face tools: one file, or numbered shards with an index.


WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"

T = TypeVar("T")
_PLAIN_NAME = re.compile(r"[^/\\:\0]+")
_PIECE = 2**18
"""Elements that are converted at once."""
_LARGEST = 100_000_000
"""Maximum bytes of a header or an index; the limit of safetensors."""


def split_into_files(
    tensors: Mapping[str, torch.Tensor], limit: int
) -> dict[str, list[str]]:
    """Assign tensors to files in order; a tensor above the limit gets its own file."""
    shards, open_, total = list[list[str]](), list[str](), 0
    for name, tensor in tensors.items():
        size = tensor.nbytes
        if size > limit:
            shards.append([name])
            continue
        if total + size > limit:
            shards.append(open_)
            open_, total = [], 0
        open_.append(name)
        total += size
    if open_ or not shards:
        shards.append(open_)
    if len(shards) == 1:
        return {WEIGHTS: shards[0]}
    count = len(shards)
    return {
        f"model-{number:05d}-of-{count:05d}.safetensors": names
        for number, names in enumerate(shards, 1)
    }


def index_of(
    plan: Mapping[str, Sequence[str]], tensors: Mapping[str, torch.Tensor]
) -> bytes:
    """Return the JSON index of several files."""
    index = {
        "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())},
        "weight_map": {name: file for file, names in plan.items() for name in names},
    }
    return json.dumps(index, indent=2).encode()


@attrs.frozen
class Shards:
    """A model's tensors in files.

    Attributes:
        tables: the description of each file, by its path.
        places: the file of each tensor, by name; in reading order.
    """

    tables: Mapping[Path, files.File]
    places: Mapping[str, Path]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return dtypes and shapes, as tensors on the meta device."""
        metas: dict[str, torch.Tensor] = {}
        for name, path in self.places.items():
            entry = self.tables[path].tensors[name]
            dtype = files.DTYPES[entry.dtype]
            metas[name] = torch.empty(entry.shape, dtype=dtype, device="meta")
        return metas

    def read(self, name: str) -> torch.Tensor:
        """Read a tensor into new memory."""
        tensor = self.tables[self.places[name]].tensors[name].empty()
        self.read_to(name, tensor)
        return tensor

    def read_to(self, name: str, tensor: torch.Tensor) -> None:
        """Read a tensor into the memory of a contiguous tensor of its shape.

        If the dtypes differ, values are converted in pieces, without a full second copy.

        Raises:
            CheckpointCorruptError: the file is missing, or too short.
        """
        with self._open(name) as (stream, begin, dtype):
            stream.seek(begin)
            if tensor.dtype == dtype:
                files.read_into(stream, files.bytes_of(tensor))
                return
            piece = torch.empty(min(tensor.numel(), _PIECE), dtype=dtype)
            for into in tensor.view(-1).split(_PIECE):
                part = piece[: into.numel()]
                files.read_into(stream, files.bytes_of(part))
                into.copy_(part)

    def read_box(self, name: str, box: Slice) -> torch.Tensor:
        """Read a box of a tensor into new memory, without reading the rest.

        Raises:
            CheckpointCorruptError: the file is missing, or too short.
        """
        with self._open(name) as (stream, begin, dtype):
            return slices.read_box(stream, begin, dtype, box)

    @contextmanager
    def _open(self, name: str) -> Generator[tuple[BinaryIO, int, torch.dtype]]:
        """Open a tensor's file; yield it with the tensor's first byte and dtype."""
        path = self.places[name]
        entry = self.tables[path].tensors[name]
        try:
            with files.open_plain(path) as stream:
                yield stream, entry.begin, files.DTYPES[entry.dtype]
        except OSError as error:
            msg = f"{path} cannot be read: {error}"
            raise CheckpointCorruptError(msg) from error


def open_weights(source: Path) -> Shards:
    """Return the tensors of a file, a folder or an index.

    Raises:
        CheckpointError: the path has no safetensors files.
        CheckpointCorruptError: a file or the index is damaged.
    """
    is_index = source.name.endswith(".index.json")
    is_known = source.suffix == ".safetensors" or (
        is_index and not source.name.endswith(".bin.index.json")
    )
    if not is_known and not arguments.is_directory(source):
        msg = (
            f"{source} is neither a .safetensors file, a folder with one, nor an index."
            f"{reader_of(source)}"
        )
        raise CheckpointError(msg)
    tables: dict[Path, files.File] = {}

    def read(path: Path) -> dict[str, Path]:
        real, tables[real] = _table(path)
        return dict.fromkeys(tables[real].tensors, real)

    return Shards(tables, read_parts(source, WEIGHTS, INDEX, read))


def read_parts(
    source: Path, weights: str, index: str, read: Callable[[Path], Mapping[str, T]]
) -> dict[str, T]:
    """Read the tensors of a file, a folder or an index, by name.

    Args:
        source: the path.
        weights: the name of the file in a folder that has one.
        index: the name of the index in a folder with several files.
        read: reads a file.

    Raises:
        CheckpointError: a folder has neither.
        CheckpointCorruptError: the index is damaged, or does not fit the files.
    """
    path = source
    if arguments.is_directory(source):
        names = [n for n in (weights, index) if arguments.exists(source / n)]
        if not names:
            present = sorted(path.name for path in source.iterdir())[:10]
            msg = (
                f"{source} has neither {weights} nor {index}; it has"
                f" {present}.{reader_of(source)}"
            )
            raise CheckpointError(msg)
        path = source / names[0]
    if not path.name.endswith(".index.json"):
        return dict(read(path))
    named = _weight_map(path, Path(weights).suffix)
    parts = {file: read(path.parent / file) for file in dict.fromkeys(named.values())}
    for name, file in named.items():
        if name not in parts[file]:
            msg = f"{path} says that {name!r} is in {file}, which has no such tensor."
            raise CheckpointCorruptError(msg)
    by_name: dict[str, T] = {}
    for file, tensors in parts.items():
        by_name |= {n: t for n, t in tensors.items() if named.get(n, file) == file}
    return by_name


def _weight_map(path: Path, ending: str) -> dict[str, str]:
    """Read the file name of each tensor from an index.

    Raises:
        CheckpointError: the index is missing.
        CheckpointCorruptError: the file is not an index, or names files outside its folder.
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
                f" a {ending} file next to it."
            )
            raise CheckpointCorruptError(msg)
    return named


def _table(path: Path) -> tuple[Path, files.File]:
    """Return a file's resolved path, and its description after comparing it with the length.

    Follows links: hubs keep files under the names of their digests, with links to them.
    """
    data = _bytes(path, header=True)
    header = _json(path, data)
    try:
        return path.resolve(), _file(header, 8 + len(data), path.stat().st_size)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        msg = f"{path} is not a safetensors file: {error}."
        raise CheckpointCorruptError(msg) from error
    except CheckpointError as error:
        msg = f"{path}: {error}"
        raise CheckpointError(msg) from error


def _file(header: dict[str, Any], first: int, size: int) -> files.File:
    """Return a file's description from its header, the first tensor's offset and the size.

    Raises:
        ValueError: the tensors do not fill the file.
        CheckpointError: accelfn does not support a dtype.
    """
    header.pop("__metadata__", None)
    for name, entry in header.items():
        if entry["dtype"] not in files.DTYPES:
            msg = f"{name!r} has the dtype {entry['dtype']!r}, which accelfn does not read."
            raise CheckpointError(msg)
    entries = sorted(header.items(), key=lambda item: item[1]["data_offsets"])
    tensors: dict[str, Any] = {}
    for name, entry in entries:
        begin, end = entry["data_offsets"]
        if type(begin) is not int or type(end) is not int:
            msg = f"{begin!r} and {end!r} are not offsets"
            raise ValueError(msg)
        kind = {"dtype": entry["dtype"], "shape": entry["shape"], "blake3": ""}
        tensors[name] = {**kind, "begin": first + begin, "end": first + end}
    blank = {"blake3": "", "header_blake3": ""}
    file = files.File.from_plain({"size": size, **blank, "tensors": tensors})
    if min((tensor.begin for tensor in file.tensors.values()), default=first) != first:
        msg = "its tensors do not begin behind its header"
        raise ValueError(msg)
    return file


def _bytes(path: Path, *, header: bool = False) -> bytes:
    """Read a file, or its header, up to a maximum length.

    Raises:
        CheckpointError: the file is missing.
        CheckpointCorruptError: the file cannot be read, or has another format.
    """
    try:
        with files.open_plain(path.resolve()) as stream:
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
        return json.loads(data, object_pairs_hook=files.reject_duplicate_keys)
    except (ValueError, RecursionError) as error:
        msg = f"{path} cannot be read: {error}."
        raise CheckpointCorruptError(msg) from error


@explain_call_errors
def export_model(
    state: TrainState,
    directory: str | os.PathLike[str],
    *,
    max_shard_size: int | str = "5GB",
    at: Literal["train", "eval"] | None = None,
) -> None:
    """Write a state's model to a new directory for Hugging Face tools; call it on all ranks.

    The directory has `model.safetensors`, or `model-00001-of-0000n.safetensors` and so on
    with `model.safetensors.index.json`. Names are those of the model's `state_dict()`,
    including persistent buffers; a tied parameter is written once. Rank 0 writes, and the
    directory appears by one rename when all files are on the disk.

    Args:
        state: not donated and not changed.
        directory: a path that does not exist yet.
        max_shard_size: the maximum size of a file's tensors, in bytes or as "5GB" or "100MiB";
            a larger tensor gets its own file.
        at: "train" exports the trained parameters of rank 0, "eval" the parameters for evaluation
            (see `ema`, `local_sgd`). You may omit it if these are the same.

    Law: `import_model` gives these tensors, bitwise, for any size of the files.

    Cost: rank 0 reads the tensors once and copies them to the host, one tensor at a time, or
    one file's tensors if they are sharded. Plus the cost of `eval_params`, and a small gather
    per file.

    Raises:
        CheckpointWriteError: on every rank, if writing failed; no directory of this name is
            left.
        ArgumentError: the size is not a valid size; or the parameters differ, and `at` is missing.
    """
    call = "af.export_model(state, directory)"
    check_state(call, state)
    path = as_path(call, directory, "a directory")
    limit = parse_bytes(f"{max_shard_size=!r}", max_shard_size)
    params = params_at(state, call, at)
    job = save_of(state, path)
    tensors: dict[str, torch.Tensor] = {}

    def begin() -> None:
        tensors.update(_exported_tensors(state, params))
        commit.begin(job)

    exchange = exchange_of(state, "export")
    job.run_on_all(exchange, Phase.BEGIN, begin)
    plan = split_into_files(tensors, limit)
    for file, names in plan.items():
        file_tensors = _gather_to_main({n: tensors[n] for n in names}, job, state.world)
        job.run_on_all(
            exchange,
            Phase.WRITE,
            partial(_write_file, job, file, file_tensors),
            task=f"write {file}",
        )

    def name_it() -> None:
        if job.rank == 0:
            if len(plan) > 1:
                files.write(job.partial / INDEX, [index_of(plan, tensors)])
            files.flush(job.partial)
            files.rename(job.partial, job.final)

    job.run_on_all(exchange, Phase.COMMIT, name_it, task="name the directory")


@explain_call_errors
def full_params(
    state: TrainState, *, at: Literal["train", "eval"] | None = None
) -> dict[str, torch.Tensor]:
    """Return full copies of the parameters on the host, by name; call it on all ranks.

    A tied parameter has all of its names, as in `state_dict()`, for one tensor.

    Args:
        state: not donated and not changed.
        at: "train" returns the trained parameters of this rank, "eval" the parameters for
            evaluation (see `ema`, `local_sgd`). You may omit it if these are the same.

    Cost: a copy of the parameters on each rank; if they are sharded, a gather for every
        32 MiB.

    Raises:
        ArgumentError: the parameters differ, and `at` is missing.
    """
    call = "af.full_params(state)"
    check_state(call, state)
    params = params_at(state, call, at)
    with own_modes(state.world.device), torch.no_grad():
        full = {n: t for n, t in params.items() if not is_shard(t)}
        copies = {n: _host(t).clone() for n, t in full.items()}
        for some in by_calls(params, state.world, label="af.full_params"):
            copies |= {n: _host(t) for n, t in some.items()}
    ties = state.definition.skeleton.aliases
    names = {**{name: name for name in params}, **ties}
    return {name: copies[first] for name, first in names.items()}


def save_pretrained(
    state: TrainState,
    directory: str | os.PathLike[str],
    *,
    at: Literal["train", "eval"] | None = None,
    **options: Any,
) -> None:
    """Call the model's own `save_pretrained` on rank 0; call it on all ranks.

    For models that write more than weights, such as those of Transformers: `from_pretrained`
    can read the directory. The directory appears when all files are written.

    Args:
        state: not donated and not changed.
        directory: a path that does not exist yet.
        at: "train" writes the trained parameters of rank 0, "eval" the parameters for evaluation
            (see `ema`, `local_sgd`). You may omit it if these are the same.
        **options: passed to the model's method, such as `max_shard_size`.

    Cost: the cost of the model's method; if parameters are sharded, a full copy on the host.

    Raises:
        CheckpointWriteError: on every rank, if the method failed; no directory of this name is
            left.
        ModelError: the model has no such method.
        ArgumentError: `options` ask to upload the directory; or the parameters differ, and `at`
            is missing.
    """
    call = "af.save_pretrained(state, directory)"
    check_state(call, state)
    path = as_path(call, directory, "a directory")
    if not callable(getattr(state.definition.skeleton.module, "save_pretrained", None)):
        kind = type(state.definition.skeleton.module).__name__
        msg = f"{kind} has no save_pretrained; use af.export_model(state, ...)."
        raise ModelError(msg)
    if options.get("push_to_hub"):
        msg = (
            "af.save_pretrained(push_to_hub=True): it writes to a directory that has its name"
            " only afterwards. Upload that."
        )
        raise ArgumentError(msg)
    params = params_at(state, call, at)
    job, exchange = save_of(state, path), exchange_of(state, "save_pretrained")
    job.run_on_all(exchange, Phase.BEGIN, lambda: commit.begin(job))
    tensors = _gather_to_main({**params, **state.buffers}, job, state.world)

    def write() -> None:
        if job.rank == 0:
            _by_its_own_method(state, tensors, job.partial, options)
            for path in job.partial.rglob("*"):
                files.flush(path)
            files.flush(job.partial)
            files.rename(job.partial, job.final)

    job.run_on_all(
        exchange, Phase.WRITE, write, task="write by the model's save_pretrained"
    )


def _exported_tensors(
    state: TrainState, params: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return the tensors to export, each under its first name in the state dict.

    Raises:
        CheckpointError: a value in the state dict is not a parameter or buffer.
        PlainDataError: safetensors cannot hold a tensor.
    """
    module = state.definition.skeleton.module
    values = {id(p): params[name] for name, p in module.named_parameters()}
    values |= {id(b): state.buffers[name] for name, b in module.named_buffers()}
    tensors, table, ids = dict[str, torch.Tensor](), Table(), set[int]()
    for name, meta in module.state_dict(keep_vars=True).items():
        if meta is None:  # a module without extra state, as in Megatron
            continue
        if id(meta) not in values:
            msg = (
                f"{name} in the model's state_dict() is a {type(meta).__name__}, not a tensor."
                " Use torch.save(model.state_dict(), ...) on the module of af.borrow_model(state)."
            )
            raise CheckpointError(msg)
        if not is_word(name):
            msg = f"{name!r} is not a text that files can hold; give the tensor another name."
            raise PlainDataError(msg)
        tensor = values[id(meta)]
        if id(meta) not in ids:
            ids.add(id(meta))
            if not is_shard(tensor):
                table.put(tensor, name)
            tensors[name] = tensor
    return tensors


def _gather_to_main(
    tensors: Mapping[str, torch.Tensor], job: Save, world: World
) -> dict[str, torch.Tensor]:
    """Gather sharded tensors to rank 0; return all tensors there, and {} on other ranks."""
    full = {n: t for n, t in tensors.items() if not is_shard(t)}
    for some in by_calls(tensors, world, label="gather what is exported"):
        full |= {n: _host(t) for n, t in some.items()} if job.rank == 0 else {}
    return {n: full[n] for n in tensors} if job.rank == 0 else {}


def _host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor on the host."""
    return tensor.detach().cpu().resolve_conj().resolve_neg()


def _write_file(job: Save, file: str, tensors: Mapping[str, torch.Tensor]) -> None:
    if job.rank == 0:
        commit.write_file(job.partial / file, tensors, {"format": "pt"})


def _by_its_own_method(
    state: TrainState,
    tensors: Mapping[str, torch.Tensor],
    directory: Path,
    options: Mapping[str, Any],
) -> None:
    """Call `save_pretrained` of a module with these tensors.

    Raises:
        CheckpointError: the method failed.
    """
    skeleton = state.definition.skeleton
    names = [name for name, _ in skeleton.module.named_buffers()]
    buffers = {name: tensors[name] for name in names}
    try:
        module: Any = skeleton.build(tensors, buffers)
        module.save_pretrained(directory, **options)
    except Exception as error:  # any error: other ranks wait for the outcome
        msg = f"{type(error).__name__}: {error}"
        raise CheckpointError(msg) from error
