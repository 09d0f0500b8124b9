# SPDX-License-Identifier: Apache-2.0
"""`export_model`: a state's model as files that others read, and its parameters as tensors."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch

from accelfn.base.arguments import as_path, is_word
from accelfn.base.calling import called
from accelfn.base.codec import Table
from accelfn.base.contexts import own_modes
from accelfn.checkpoint import commit, disk, files
from accelfn.checkpoint.commit import Save
from accelfn.checkpoint.save import exchange_of, save_of
from accelfn.checkpoint.slices import is_sharded
from accelfn.collectives import by_calls
from accelfn.errors import (
    ArgumentError,
    CheckpointError,
    ModelError,
    PlainDataError,
)
from accelfn.state.argument import check_state
from accelfn.state.state import TrainState
from accelfn.state.views import params_at
from accelfn.weights.shards import INDEX, bytes_in, divided, index_of
from accelfn.world import World


@called
def export_model(
    state: TrainState,
    directory: str | os.PathLike[str],
    *,
    max_shard_size: int | str = "5GB",
    at: Literal["train", "eval"] = "eval",
) -> None:
    """Write a state's model to a new directory, as Hugging Face tools read it; on all ranks.

    The directory has `model.safetensors`, or `model-00001-of-0000n.safetensors` and so on
    with `model.safetensors.index.json`. Names are those of the model's `state_dict()`,
    persistent buffers among them; a tied parameter is there once. Rank 0 writes, and the
    directory appears by one rename when all of it is on the disk.

    Args:
        state: not donated; it stays as it is.
        directory: does not exist yet.
        max_shard_size: of a file's tensors, in bytes or as "5GB" or "100MiB"; a tensor that is
            larger has a file of its own.
        at: "train" takes the parameters that are trained, of rank 0, in place of those to
            evaluate (see `ema`, `local_sgd`).

    Law: `import_model` gives these tensors, bitwise, whatever the size of the files.

    Cost: one reading of the tensors by rank 0; one at a time is copied to the host, and of
    sharded parameters one file's. What `eval_params` costs, and a small gather a file.

    Raises:
        CheckpointWriteError: on every rank, if it could not be written; nothing is left under
            the directory's name.
        ArgumentError: the size is none.
    """
    call = "af.export_model(state, directory)"
    check_state(call, state)
    path, limit = as_path(call, directory, "a directory"), bytes_in(max_shard_size)
    params = params_at(state, call, at)
    job = save_of(state, path)
    tensors: dict[str, torch.Tensor] = {}

    def begin() -> None:
        tensors.update(_named(state, params))
        commit.begin(job)

    exchange = exchange_of(state, "export")
    job.agreed(exchange, "begin", begin)
    plan = divided(tensors, limit)
    for file, names in plan.items():
        held = _held({n: tensors[n] for n in names}, job, state.world)
        job.agreed(exchange, f"write {file}", _writing(job, file, held))

    def name_it() -> None:
        if job.rank == 0:
            if len(plan) > 1:
                disk.write(job.partial / INDEX, [index_of(plan, tensors)])
            disk.flush(job.partial)
            disk.rename(job.partial, job.final)

    job.agreed(exchange, "name the directory", name_it)


@called
def full_params(
    state: TrainState, *, at: Literal["train", "eval"] = "eval"
) -> dict[str, torch.Tensor]:
    """Return copies of the whole parameters on the host, by name; call it on all ranks.

    A tied parameter has all its names, as in `state_dict()`, for one tensor.

    Args:
        state: not donated; it stays as it is.
        at: "train" takes this rank's parameters as they are trained, in place of those to
            evaluate.

    Cost: a copy of the parameters on each rank; where they are sharded, a gather for every
        32 MiB.
    """
    call = "af.full_params(state)"
    check_state(call, state)
    params = params_at(state, call, at)
    with own_modes(state.world.device), torch.no_grad():
        found = {n: t for n, t in params.items() if not is_sharded(t)}
        copies = {n: _host(t).clone() for n, t in found.items()}
        for some in by_calls(params, state.world, label="af.full_params"):
            copies |= {n: _host(t) for n, t in some.items()}
    ties = state.definition.skeleton.aliases
    names = {**{name: name for name in params}, **ties}
    return {name: copies[first] for name, first in names.items()}


@called
def save_pretrained(
    state: TrainState,
    directory: str | os.PathLike[str],
    *,
    at: Literal["train", "eval"] = "eval",
    **options: Any,
) -> None:
    """Write a state's model by its own method of this name, on rank 0; call it on all ranks.

    For models that write more than weights, such as those of Transformers, whose
    `from_pretrained` then needs nothing else. The directory appears when all is written.

    Args:
        state: not donated; it stays as it is.
        directory: does not exist yet.
        at: "train" takes the parameters that are trained, of rank 0, in place of those to
            evaluate.
        **options: handed on, such as `max_shard_size`.

    Cost: what the model's method costs; where parameters are sharded, a copy of all of them on
    the host.

    Raises:
        CheckpointWriteError: on every rank, if the method failed; nothing is left under the
            directory's name.
        ModelError: the model has no such method.
        ArgumentError: it was to upload what it writes, too.
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
    if "raw" in options:
        msg = f'{call}, raw=: write at="train" in place of raw=True, at="eval" of raw=False.'
        raise ArgumentError(msg)
    params = params_at(state, call, at)
    job, exchange = save_of(state, path), exchange_of(state, "save_pretrained")
    job.agreed(exchange, "begin", lambda: commit.begin(job))
    tensors = _held({**params, **state.buffers}, job, state.world)

    def write() -> None:
        if job.rank == 0:
            _by_its_own_method(state, tensors, job.partial, options)
            for path in job.partial.rglob("*"):
                disk.flush(path)
            disk.flush(job.partial)
            disk.rename(job.partial, job.final)

    job.agreed(exchange, "write by the model's save_pretrained", write)


def _named(
    state: TrainState, params: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return what is exported, each tensor once, under its first name in the state dict.

    Raises:
        CheckpointError: something in the state dict is no parameter or buffer.
        PlainDataError: safetensors cannot hold it.
    """
    module = state.definition.skeleton.module
    values = {id(p): params[name] for name, p in module.named_parameters()}
    values |= {id(b): state.buffers[name] for name, b in module.named_buffers()}
    found, checked, seen = dict[str, torch.Tensor](), Table(), set[int]()
    for name, meta in module.state_dict(keep_vars=True).items():
        if meta is None:  # what a module that has no extra state may say, as Megatron's
            continue
        if id(meta) not in values:
            msg = (
                f"{name} in the model's state_dict() is a {type(meta).__name__} that is no"
                " parameter or buffer, and no place for it is in an export. Use"
                " torch.save(model.state_dict(), ...) on the module of af.bind(state)."
            )
            raise CheckpointError(msg)
        if not is_word(name):
            msg = f"{name!r} is no text that files can hold; give the tensor another name."
            raise PlainDataError(msg)
        tensor = values[id(meta)]
        if id(meta) not in seen:
            seen.add(id(meta))
            if not is_sharded(tensor):
                checked.put(tensor, name)
            found[name] = tensor
    return found


def _held(
    tensors: Mapping[str, torch.Tensor], job: Save, world: World
) -> dict[str, torch.Tensor]:
    """Return tensors as rank 0 writes them, sharded ones gathered; nothing elsewhere."""
    held = {n: t for n, t in tensors.items() if not is_sharded(t)}
    for some in by_calls(tensors, world, label="gather what is exported"):
        held |= {n: _host(t) for n, t in some.items()} if job.rank == 0 else {}
    return {n: held[n] for n in tensors} if job.rank == 0 else {}


def _host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor on the host."""
    return tensor.detach().cpu().resolve_conj().resolve_neg()


def _writing(
    job: Save, file: str, held: Mapping[str, torch.Tensor]
) -> Callable[[], None]:
    def write() -> None:
        if job.rank == 0:
            path = job.partial / file
            try:
                files.write(path, held, {"format": "pt"})
            except OSError as error:
                commit.explain(error, path, held)

    return write


def _by_its_own_method(
    state: TrainState,
    tensors: Mapping[str, torch.Tensor],
    directory: Path,
    options: Mapping[str, Any],
) -> None:
    """Let a module around these tensors write itself.

    Raises:
        CheckpointError: it failed.
    """
    skeleton = state.definition.skeleton
    names = [name for name, _ in skeleton.module.named_buffers()]
    buffers = {name: tensors[name] for name in names}
    try:
        module: Any = skeleton.build(tensors, buffers)
        module.save_pretrained(directory, **options)
    except Exception as error:  # whatever it is, the other ranks wait to hear of it
        msg = f"{type(error).__name__}: {error}"
        raise CheckpointError(msg) from error
