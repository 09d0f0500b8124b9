# SPDX-License-Identifier: Apache-2.0
"""Export a state's model to safetensors files, or its parameters as full (unsharded) tensors."""

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

from accelfn import TrainState, World
from accelfn.errors import (
    ArgumentError,
    CheckpointCorruptError,
    CheckpointError,
    ModelError,
    PlainDataError,
)
from accelfn.plug import (
    arguments,
    check_state,
    codec,
    collectives,
    commit,
    draws,
    files,
    params_at,
    save,
    slices,
    tree,
)

# The files that Hugging Face tools expect: one file, or several numbered files with an index.


WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"

T = TypeVar("T")
PLAIN_NAME = re.compile(r"[^/\\:\0]+")
_PIECE = 2**18
"""The number of elements that are converted at once."""
_LARGEST = 100_000_000
"""The maximum number of bytes of a header or an index, as in safetensors."""


def split_into_files(
    tensors: Mapping[str, torch.Tensor], limit: int
) -> dict[str, list[str]]:
    """Assign tensors to files, in order; return the names of the tensors in each file.

    A file has at most `limit` bytes of tensors. A larger tensor gets its own file.
    """
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
    """Return the index of several files, as JSON."""
    index = {
        "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())},
        "weight_map": {name: file for file, names in plan.items() for name in names},
    }
    return json.dumps(index, indent=2).encode()


@contextmanager
def raise_corrupt(problem: str, *kinds: type[Exception]) -> Generator[None]:
    """In a `with` block that reads a file, convert errors to `CheckpointCorruptError`.

    Args:
        problem: the first words of the error message.
        kinds: the types of errors to convert. `Exception` converts all errors of a damaged
            file, but no `CheckpointError`.
    """
    try:
        yield
    except CheckpointError:
        raise
    except kinds as error:
        msg = f"{problem}: {commit.format_error(error)}"
        raise CheckpointCorruptError(msg) from error


@attrs.frozen
class Shards:
    """The tensors of a model in safetensors files.

    Attributes:
        places: the path of each tensor's file, and the tensor's description there, by the
            tensor's name, in the order of reading.
    """

    places: Mapping[str, tuple[Path, files.Entry]]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return all tensors by name, without values, on the meta device."""
        return {
            name: torch.empty(
                entry.shape, dtype=files.DTYPES[entry.dtype], device="meta"
            )
            for name, (_, entry) in self.places.items()
        }

    def read(self, name: str) -> torch.Tensor:
        """Read a tensor into new memory."""
        tensor = self.places[name][1].empty()
        self.read_to(name, tensor)
        return tensor

    def read_to(self, name: str, tensor: torch.Tensor) -> None:
        """Read a tensor into the memory of another tensor, which is contiguous.

        If the dtypes differ, values are converted in pieces, so no second tensor is needed.

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

    def read_box(self, name: str, box: slices.Slice) -> torch.Tensor:
        """Read a box of a tensor into new memory, without reading the rest.

        Raises:
            CheckpointCorruptError: the file is missing, or too short.
        """
        with self._open(name) as (stream, begin, dtype):
            return slices.read_box(stream, begin, dtype, box)

    @contextmanager
    def _open(self, name: str) -> Generator[tuple[BinaryIO, int, torch.dtype]]:
        """Open a tensor's file; yield it with the offset and the dtype of the tensor."""
        path, entry = self.places[name]
        with (
            raise_corrupt(f"{path} cannot be read", OSError),
            files.open_plain(path) as stream,
        ):
            yield stream, entry.begin, files.DTYPES[entry.dtype]


def open_weights(source: Path) -> Shards:
    """Return the tensors in a safetensors file, in a folder, or in the files of an index.

    Raises:
        CheckpointError: the path has no safetensors files.
        CheckpointCorruptError: a file or the index is damaged.
    """
    is_known = source.name.endswith((".safetensors", ".index.json"))
    is_known = is_known and not source.name.endswith(".bin.index.json")
    if not is_known and not arguments.is_directory(source):
        msg = (
            f"{source} is not a .safetensors file, a folder with such files, or their index."
            f"{files.reader_of(source)}"
        )
        raise CheckpointError(msg)
    return Shards(read_parts(source, WEIGHTS, INDEX, _places_in))


def read_parts(
    source: Path, weights: str, index: str, read: Callable[[Path], Mapping[str, T]]
) -> dict[str, T]:
    """Read the tensors in a file, in a folder, or in the files of an index, by name.

    Args:
        source: the path of the file, folder or index.
        weights: the name of the file in a folder with a single file.
        index: the name of the index in a folder with several files.
        read: a function of a path that reads a file, and returns its tensors by name.

    Raises:
        CheckpointError: the folder has neither such a file nor such an index.
        CheckpointCorruptError: the index is damaged, or does not fit the files.
    """
    path = source
    if arguments.is_directory(source):
        names = [n for n in (weights, index) if arguments.exists(source / n)]
        if not names:
            present = sorted(path.name for path in source.iterdir())[:10]
            msg = (
                f"{source} has neither {weights} nor {index}, but"
                f" {', '.join(present) or 'no file'}.{files.reader_of(source)}"
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
    return {
        name: tensor
        for file, tensors in parts.items()
        for name, tensor in tensors.items()
        if named.get(name, file) == file
    }


def _weight_map(path: Path, ending: str) -> dict[str, str]:
    """Read the file name of each tensor from an index.

    Raises:
        CheckpointError: the index is missing.
        CheckpointCorruptError: the file is not an index, or names files outside its folder.
    """
    index = _json(path, _bytes(path))
    named = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(named, dict):
        msg = f'{path} is not an index: it has no "weight_map" from tensor names to files.'
        raise CheckpointCorruptError(msg)
    for name, file in named.items():
        plain = isinstance(file, str) and PLAIN_NAME.fullmatch(file)
        if not plain or not file.endswith(ending):
            msg = (
                f"{path} says that {name!r} is in {file!r}, which is not the name of a {ending}"
                " file in the same folder."
            )
            raise CheckpointCorruptError(msg)
    return named


def _places_in(path: Path) -> dict[str, tuple[Path, files.Entry]]:
    """Return the resolved path and the description of each tensor in a file.

    Symbolic links are followed, because caches of model hubs consist of links.

    Raises:
        CheckpointError: accelfn does not support a dtype.
        CheckpointCorruptError: the tensors do not fill the file.
    """
    data = _bytes(path, header=True)
    header, first = _json(path, data), 8 + len(data)
    kinds = AttributeError, KeyError, TypeError, ValueError
    with raise_corrupt(f"{path} is not a safetensors file", *kinds):
        header.pop("__metadata__", None)
        for name, row in header.items():
            if row["dtype"] not in files.DTYPES:
                dtype = row["dtype"]
                msg = f"{path}: {name!r} has the dtype {dtype!r}, which accelfn does not read."
                raise CheckpointError(msg)
        tensors: dict[str, Any] = {}
        for name, row in sorted(
            header.items(), key=lambda item: item[1]["data_offsets"]
        ):
            begin, end = row["data_offsets"]
            if type(begin) is not int or type(end) is not int:
                msg = f"{begin!r} and {end!r} are not offsets"
                raise ValueError(msg)
            kind = {"dtype": row["dtype"], "shape": row["shape"], "blake3": ""}
            tensors[name] = {**kind, "begin": first + begin, "end": first + end}
        plain = {"size": path.stat().st_size, "tensors": tensors}
        file = files.File.from_plain({**plain, "blake3": "", "header_blake3": ""})
        begins = (entry.begin for entry in file.tensors.values())
        if next(begins, first) != first:
            msg = "its first tensor does not begin directly after its header"
            raise ValueError(msg)
    real = path.resolve()
    return {name: (real, entry) for name, entry in file.tensors.items()}


def _bytes(path: Path, *, header: bool = False) -> bytes:
    """Read a whole file, or only its safetensors header, up to a maximum length.

    Raises:
        CheckpointError: the file is missing.
        CheckpointCorruptError: the file cannot be read, or has another format.
    """
    check_exists(path)
    with (
        raise_corrupt(f"{path} cannot be read", OSError),
        files.open_plain(path.resolve()) as stream,
    ):
        size = stream.seek(0, 2)
        stream.seek(0)
        length = int.from_bytes(stream.read(8), "little") if header else size
        if length > min(size - 8 * header, _LARGEST):
            msg = (
                f"{path} has {size} bytes, but should have {length} bytes of JSON. The file is"
                " truncated, or has another format."
            )
            raise CheckpointCorruptError(msg)
        return stream.read(length)


def check_exists(path: Path) -> None:
    """Raise `CheckpointError` if a path does not exist."""
    if not arguments.exists(path):
        msg = f"{path} does not exist."
        raise CheckpointError(msg)


def _json(path: Path, data: bytes) -> Any:
    with raise_corrupt(f"{path} cannot be read", ValueError, RecursionError):
        return json.loads(data, object_pairs_hook=files.reject_duplicate_keys)


@arguments.explain_call_errors
def export_model(
    state: TrainState,
    directory: str | os.PathLike[str],
    *,
    max_shard_size: int | str = "5GB",
    at: Literal["train", "eval"] | None = None,
) -> None:
    """Write a state's model to a new directory for Hugging Face tools; call it on all ranks.

    The directory has `model.safetensors`, or several files such as
    `model-00001-of-00002.safetensors` with `model.safetensors.index.json`. Tensors have their
    names in the model's `state_dict()`, which includes persistent buffers. A tied parameter is
    written once. Only rank 0 writes. The directory gets its name when all files are on the disk.

    Args:
        state: the state, which is not donated and not changed.
        directory: a path that does not exist yet.
        max_shard_size: the maximum size of the tensors in a file, in bytes or as a string such
            as "5GB" or "100MiB". A larger tensor gets its own file.
        at: which parameters to export. "train": the trained parameters of rank 0. "eval": the
            parameters for evaluation (see `ema` and `local_sgd`). You can leave it out if both
            are the same.

    Law: `import_model` returns bitwise these tensors, for any `max_shard_size`.

    Cost: rank 0 reads the tensors once, and copies them to host memory one at a time. If they
    are sharded, it copies all tensors of one file at a time. Added to that is the cost of the
    transforms' `eval_params`, and a small gather for each file.

    Raises:
        CheckpointWriteError: on every rank, if writing failed. No directory of this name is
            left.
        ArgumentError: the size is not valid; or the parameters for training and evaluation
            differ, and `at` is missing.
    """
    call = "af.export_model(state, directory)"
    check_state(call, state)
    path = arguments.as_path(call, directory, "a directory")
    limit = arguments.parse_bytes(f"{max_shard_size=!r}", max_shard_size)
    params = params_at(state, call, at)
    job = save.save_of(state, path)
    tensors: dict[str, torch.Tensor] = {}

    def begin() -> None:
        tensors.update(_exported_tensors(state, params))
        commit.begin(job)

    exchange = save.exchange_of(state, "export")
    job.run_on_all(exchange, commit.Phase.BEGIN, begin)
    plan = split_into_files(tensors, limit)
    for file, names in plan.items():
        file_tensors = _gather_to_main({n: tensors[n] for n in names}, job, state.world)
        job.run_on_all(
            exchange,
            commit.Phase.WRITE,
            partial(_write_file, job, file, file_tensors),
            task=f"write {file}",
        )

    def name_it() -> None:
        if job.rank == 0:
            if len(plan) > 1:
                files.write(job.partial / INDEX, [index_of(plan, tensors)])
            files.flush(job.partial)
            files.rename(job.partial, job.final)

    job.run_on_all(exchange, commit.Phase.COMMIT, name_it, task="name the directory")


@arguments.explain_call_errors
def full_params(
    state: TrainState, *, at: Literal["train", "eval"] | None = None
) -> dict[str, torch.Tensor]:
    """Return full (unsharded) copies of the parameters on the CPU; call it on all ranks.

    The result is a dict by name. A tied parameter appears under all of its names, as in
    `state_dict()`, with the same tensor.

    Args:
        state: the state, which is not donated and not changed.
        at: which parameters to return. "train": the trained parameters of this rank. "eval":
            the parameters for evaluation (see `ema` and `local_sgd`). You can leave it out if
            both are the same.

    Cost: each rank has a copy of all parameters. If they are sharded, there is a gather for
        every 32 MiB.

    Raises:
        ArgumentError: the parameters for training and evaluation differ, and `at` is missing.
    """
    call = "af.full_params(state)"
    check_state(call, state)
    params = params_at(state, call, at)
    with draws.own_modes(state.world.device), torch.no_grad():
        full = _gather(params, state.world, label="af.full_params")
        copies = {
            n: t if tree.is_shard(params[n]) else _host(t).clone()
            for n, t in full.items()
        }
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
    """Save a state's model with the model's own `save_pretrained`; call it on all ranks.

    Use this function for models that save more than weights, such as models of Transformers.
    Their `from_pretrained` can read the directory. Only rank 0 calls the model's method. The
    directory gets its name when all files are written.

    Args:
        state: the state, which is not donated and not changed.
        directory: a path that does not exist yet.
        at: which parameters to save. "train": the trained parameters of rank 0. "eval": the
            parameters for evaluation (see `ema` and `local_sgd`). You can leave it out if both
            are the same.
        **options: arguments of the model's method, such as `max_shard_size`.

    Cost: the cost of the model's method. If parameters are sharded, rank 0 also needs a full
    copy of them in host memory.

    Raises:
        CheckpointWriteError: on every rank, if the method failed. No directory of this name is
            left.
        ModelError: the model has no such method.
        ArgumentError: `options` has `push_to_hub`; or the parameters for training and
            evaluation differ, and `at` is missing.
    """
    call = "af.save_pretrained(state, directory)"
    check_state(call, state)
    path = arguments.as_path(call, directory, "a directory")
    if not callable(getattr(state.definition.skeleton.module, "save_pretrained", None)):
        kind = type(state.definition.skeleton.module).__name__
        msg = f"The model, a {kind}, has no save_pretrained. Use af.export_model(state, directory)."
        raise ModelError(msg)
    if options.get("push_to_hub"):
        msg = (
            "af.save_pretrained(push_to_hub=True): accelfn renames the directory after the model"
            " has written it, so the model cannot upload it. Upload it after this call."
        )
        raise ArgumentError(msg)
    params = params_at(state, call, at)
    job, exchange = (
        save.save_of(state, path),
        save.exchange_of(state, "save_pretrained"),
    )
    job.run_on_all(exchange, commit.Phase.BEGIN, lambda: commit.begin(job))
    tensors = _gather_to_main({**params, **state.buffers}, job, state.world)

    def write() -> None:
        if job.rank == 0:
            skeleton = state.definition.skeleton
            names = [name for name, _ in skeleton.module.named_buffers()]
            module: Any = skeleton.build(tensors, {n: tensors[n] for n in names})
            module.save_pretrained(job.partial, **options)
            for path in job.partial.rglob("*"):
                files.flush(path)
            files.flush(job.partial)
            files.rename(job.partial, job.final)

    job.run_on_all(
        exchange, commit.Phase.WRITE, write, task="write by the model's save_pretrained"
    )


def _exported_tensors(
    state: TrainState, params: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return the tensors to export, each with its first name in the state dict.

    Raises:
        CheckpointError: a value in the state dict is not a parameter or buffer.
        PlainDataError: a tensor cannot be saved in a safetensors file.
    """
    module = state.definition.skeleton.module
    values = {id(p): params[name] for name, p in module.named_parameters()}
    values |= {id(b): state.buffers[name] for name, b in module.named_buffers()}
    tensors, table, ids = dict[str, torch.Tensor](), codec.Table(), set[int]()
    for name, meta in module.state_dict(keep_vars=True).items():
        if meta is None:  # in models of Megatron, a module without extra state
            continue
        if id(meta) not in values:
            msg = (
                f"{name} in the model's state_dict() is a {type(meta).__name__}, not a parameter or"
                " buffer. Use torch.save(model.state_dict(), file) inside `with"
                " af.borrow_model(state) as model:`."
            )
            raise CheckpointError(msg)
        if not arguments.is_word(name):
            msg = f"The tensor name {name!r} cannot be written to a file. Rename the tensor."
            raise PlainDataError(msg)
        tensor = values[id(meta)]
        if id(meta) not in ids:
            ids.add(id(meta))
            if not tree.is_shard(tensor):
                table.put(tensor, name)
            tensors[name] = tensor
    return tensors


def _gather(
    tensors: Mapping[str, torch.Tensor], world: World, *, label: str, keep: bool = True
) -> dict[str, torch.Tensor]:
    """Gather sharded tensors; return all tensors if `keep` is true, and {} otherwise."""
    full = {n: t for n, t in tensors.items() if not tree.is_shard(t)}
    for some in collectives.by_calls(tensors, world, label=label):
        full |= {n: _host(t) for n, t in some.items()} if keep else {}
    return {n: full[n] for n in tensors} if keep else {}


def _gather_to_main(
    tensors: Mapping[str, torch.Tensor], job: commit.Save, world: World
) -> dict[str, torch.Tensor]:
    """Gather sharded tensors; return all tensors on rank 0, and {} on other ranks."""
    label = "gather what is exported"
    return _gather(tensors, world, label=label, keep=job.rank == 0)


def _host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in host memory."""
    return tensor.detach().cpu().resolve_conj().resolve_neg()


def _write_file(
    job: commit.Save, file: str, tensors: Mapping[str, torch.Tensor]
) -> None:
    if job.rank == 0:
        commit.write_file(job.partial / file, tensors, {"format": "pt"})
