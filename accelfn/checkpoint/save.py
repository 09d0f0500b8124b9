# SPDX-License-Identifier: Apache-2.0
"""`save` and `load`: a state as a directory that anyone can read.

A checkpoint is a directory with `manifest.json` and safetensors files. It appears by one
rename, after everything in it was flushed to the disk, so it is whole or not there.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import attrs
import safetensors.torch
import torch

from accelfn.checkpoint.codec import decode, encode
from accelfn.collectives import gather_text
from accelfn.cursor import Cursor
from accelfn.errors import CheckpointError
from accelfn.lease import Lease
from accelfn.state import TrainState

FORMAT = 1
_MANIFEST = "manifest.json"


def save(state: TrainState, directory: str | os.PathLike[str]) -> None:
    """Write every field of a state to a new directory; call it on all ranks.

    Where all ranks agree, rank 0 writes for all, and the checkpoint can be loaded on any
    number of ranks. Where they may not (`local_sgd` between averages, buffers such as batch
    statistics), each rank writes its own tensors, and it is loaded on as many.

    Args:
        state: not donated; it stays as it is.
        directory: does not exist yet.

    Law: `load(save(s))` is `s`, bitwise, and a step from either is the same.

    Cost: one copy of the tensors to the disk, hashed and flushed.

    Raises:
        CheckpointError: on every rank, if any rank could not write; the reason is named and
            nothing is left under the directory's name.
    """
    state.lease.check()
    world = state.world
    final = Path(directory).absolute()
    # of a directory without a name, "/", the refusal follows
    partial = final.parent / f".partial-{final.name}"
    own = _differs_by_rank(state)
    _agreed(state, "begin", lambda: _begin(partial, final) if world.is_main else None)
    mine: dict[str, torch.Tensor] = {}
    coded: Any = None

    def write() -> str:
        nonlocal coded
        coded = encode(_fields(state), mine)
        if own or world.is_main:
            return _write_tensors(mine, partial / f"rank-{world.rank:05d}.safetensors")
        return ""

    hashes = _agreed(state, "write tensors", write)

    def commit() -> None:
        manifest = {
            "format": FORMAT,
            "world_size": world.size,
            "per_rank": own,
            "optimizer": _optimizer_name(state),
            "transforms": [each.name for each in state.setup],
            "files": [digest for digest in hashes if digest],
            "state": coded,
        }
        _write_flushed(partial / _MANIFEST, _sealed(manifest))
        _flush_directory(partial)
        partial.rename(final)
        _flush_directory(final.parent)

    _agreed(state, "commit", lambda: commit() if world.is_main else None)


def load(state: TrainState, directory: str | os.PathLike[str]) -> TrainState:
    """Return the saved state, with the definition of the given one; call it on all ranks.

    Args:
        state: says model, optimizer, setup, data and world; it is not changed.
        directory: that `save` wrote.

    Raises:
        CheckpointError: a file is missing, changed or of another format, or model,
            transforms or world differ from what was saved; the differences are listed.
    """
    state.lease.check()
    folder = Path(directory)
    manifest = _read_manifest(folder)
    world = state.world
    if manifest["per_rank"] and manifest["world_size"] != world.size:
        msg = (
            f"{folder} holds tensors that differ by rank, saved on"
            f" {manifest['world_size']} ranks; this world has {world.size}. Save after"
            " af.finalize(state) to load it on another number."
        )
        raise CheckpointError(msg)
    rank = world.rank if manifest["per_rank"] else 0
    tensors = _read_tensors(folder, rank, manifest["files"], str(world.device))
    saved = decode(manifest["state"], tensors)
    _check_transforms(state, manifest, saved, folder)
    if manifest["optimizer"] != _optimizer_name(state):
        msg = (
            f"{folder} holds the state of {manifest['optimizer']}, but this state's"
            f" optimizer is {_optimizer_name(state)}."
        )
        raise CheckpointError(msg)
    for field, current in (("params", state.params), ("buffers", state.buffers)):
        _check_tensors(f"{folder}: {field}", saved[field], current)
    return attrs.evolve(
        state,
        params={name: saved["params"][name] for name in state.params},
        buffers={name: saved["buffers"][name] for name in state.buffers},
        opt_state=saved["opt_state"],
        step=saved["step"],
        cursor=Cursor(*saved["cursor"]),
        seed=saved["seed"],
        slots=saved["slots"],
        lease=Lease(),
    )


def _fields(state: TrainState) -> dict[str, Any]:
    return {
        "params": dict(state.params),
        "buffers": dict(state.buffers),
        "opt_state": {name: dict(entry) for name, entry in state.opt_state.items()},
        "step": state.step,
        "cursor": [state.cursor.epoch, state.cursor.samples],
        "seed": state.seed,
        "slots": dict(state.slots),
    }


def _optimizer_name(state: TrainState) -> str:
    kind = type(state.definition.optimizer)
    return f"{kind.__module__}.{kind.__qualname__}"


def _differs_by_rank(state: TrainState) -> bool:
    if state.world.size == 1:
        return False
    return "replicas_agree" in state.setup.gives_up() or bool(state.buffers)


def _agreed(state: TrainState, what: str, act: Callable[[], str | None]) -> list[str]:
    """Run `act` on every rank and return all results, or raise on every rank."""
    failure: Exception | None = None
    try:
        outcome = f"ok {act() or ''}"
    except (OSError, CheckpointError, safetensors.SafetensorError) as error:
        failure, outcome = error, f"failed {error}"
    world = state.world
    outcomes = (
        gather_text(outcome, world, label=f"save: {what}")
        if world.size > 1
        else [outcome]
    )
    for rank, text in enumerate(outcomes):
        if text.startswith("failed "):
            msg = (
                f"The state of step {state.step} was not saved: rank {rank} could not"
                f" {what}: {text[7:]}"
            )
            raise CheckpointError(msg) from failure
    return [text[3:] for text in outcomes]


def _begin(partial: Path, final: Path) -> None:
    if final.exists():
        msg = (
            f"{final} exists already; save to a new directory, such as {final.name}-2."
        )
        raise CheckpointError(msg)
    if partial.exists():
        shutil.rmtree(partial)  # what an interrupted save left
    partial.mkdir(parents=True)


def _write_tensors(tensors: Mapping[str, torch.Tensor], path: Path) -> str:
    """Write a safetensors file, flushed to the disk, and return its SHA-256."""
    # copies: safetensors refuses tensors that share memory, as views of one storage do
    dense = {
        key: tensor.detach().cpu().contiguous().clone()
        for key, tensor in tensors.items()
    }
    data = safetensors.torch.save(dense)
    _write_flushed(path, data)
    return hashlib.sha256(data).hexdigest()


def _write_flushed(path: Path, data: bytes) -> None:
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _flush_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _sealed(manifest: dict[str, Any]) -> bytes:
    """Return the manifest as JSON with the SHA-256 of its own canonical form."""
    return json.dumps({"sha256": _digest(manifest), **manifest}, indent=1).encode()


def _digest(manifest: dict[str, Any]) -> str:
    canonical = json.dumps(manifest, sort_keys=True).encode()
    return hashlib.sha256(canonical).hexdigest()


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / _MANIFEST
    try:
        manifest = cast("dict[str, Any]", json.loads(path.read_bytes()))
        version, seal = manifest["format"], manifest.pop("sha256", None)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        msg = f"{path} cannot be read as a checkpoint's manifest: {error}"
        raise CheckpointError(msg) from error
    if version != FORMAT:
        msg = f"{path} has format {version!r}; this version of accelfn reads {FORMAT}."
        raise CheckpointError(msg)
    if seal != _digest(manifest):
        msg = f"{path} is not what was saved: its SHA-256 differs. Load another checkpoint."
        raise CheckpointError(msg)
    return manifest


def _read_tensors(
    folder: Path, rank: int, hashes: list[str], device: str
) -> dict[str, torch.Tensor]:
    path = folder / f"rank-{rank:05d}.safetensors"
    try:
        data = path.read_bytes()
    except OSError as error:
        msg = f"{path} cannot be read: {error}"
        raise CheckpointError(msg) from error
    if rank >= len(hashes) or hashlib.sha256(data).hexdigest() != hashes[rank]:
        msg = (
            f"{path} is not what was saved: its SHA-256 differs from the manifest's."
            " Load another checkpoint."
        )
        raise CheckpointError(msg)
    return {
        key: tensor.to(device) for key, tensor in safetensors.torch.load(data).items()
    }


def _check_transforms(
    state: TrainState,
    manifest: Mapping[str, Any],
    saved: Mapping[str, Any],
    folder: Path,
) -> None:
    """Refuse slots of transforms that are gone, and transforms whose slot is missing."""
    mine = {each.name for each in state.setup}
    gone = [n for n in manifest["transforms"] if n in saved["slots"] and n not in mine]
    new = [
        each.name
        for each in state.setup.having("init")
        if each.name not in saved["slots"]
    ]
    if gone or new:
        msg = (
            f"{folder}: the setup differs from the saved one: slots of transforms that"
            f" are gone {gone}, transforms without a saved slot {new}. Load into a"
            " state of the saved setup, then use state.with_setup."
        )
        raise CheckpointError(msg)


def _check_tensors(
    where: str, saved: Mapping[str, torch.Tensor], current: Mapping[str, torch.Tensor]
) -> None:
    missing = sorted(current.keys() - saved.keys())
    extra = sorted(saved.keys() - current.keys())
    changed = [
        f"{name} is {tuple(saved[name].shape)} {saved[name].dtype}, expected"
        f" {tuple(tensor.shape)} {tensor.dtype}"
        for name, tensor in current.items()
        if name in saved
        and (saved[name].shape, saved[name].dtype) != (tensor.shape, tensor.dtype)
    ]
    if missing or extra or changed:
        msg = (
            f"{where} differ from the model: missing {missing[:10]}, unexpected"
            f" {extra[:10]}, changed {changed[:10]}."
        )
        raise CheckpointError(msg)
