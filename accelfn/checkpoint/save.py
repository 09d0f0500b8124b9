# SPDX-License-Identifier: Apache-2.0
"""`save` and `load`: a state as a directory that anyone can read.

A checkpoint is a directory with `manifest.json` and safetensors files. It appears by one
rename, after everything in it was flushed to the disk, so it is whole or not there.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import attrs
import safetensors
import torch

from accelfn.codec import decode, encode, pack, unpack
from accelfn.collectives import checksum, gather_text
from accelfn.cursor import Cursor
from accelfn.errors import ArgumentError, CheckpointError, PlainDataError
from accelfn.lease import Lease
from accelfn.state import TrainState

FORMAT = 1
_MANIFEST = "manifest.json"


def save(state: TrainState, directory: str | os.PathLike[str]) -> None:
    """Write every field of a state to a new directory; call it on all ranks.

    Where all ranks hold the same, rank 0 writes for all, and the checkpoint can be loaded
    on any number of ranks. Where they do not, as under `local_sgd`, each rank writes its
    own, and it is loaded on as many. Buffers alone may differ (batch statistics): then
    another number of ranks gets those of rank 0.

    Args:
        state: not donated; it stays as it is.
        directory: does not exist yet.

    Law: `load(save(s))` is `s`, bitwise, and a step from either is the same.

    Cost: a sum over the tensors, and one copy of them to the disk, hashed and flushed.

    Raises:
        CheckpointError: on every rank, if any rank could not write; the reason is named and
            nothing is left under the directory's name.
    """
    state.lease.check()
    world = state.world
    final = Path(directory).absolute()
    # of a directory without a name, "/", the refusal follows
    partial = final.parent / f".partial-{final.name}"
    differing: list[str] = []
    fields: dict[str, Any] = {}
    tensors: dict[str, torch.Tensor] = {}

    def begin() -> str:
        for field, value in fields_of(state).items():
            fields[field] = encode(value, tensors, path=field)
        if world.is_main:
            _begin(partial, final)
        return json.dumps(_prints(fields, tensors))

    prints = [json.loads(text) for text in _agreed(state, "begin", begin)]
    differing += [f for f in fields if any(p[f] != prints[0][f] for p in prints)]

    def write() -> str:
        if differing or world.is_main:
            return _write_rank(fields, tensors, partial / _rank_file(world.rank))
        return ""

    digests = _agreed(state, "write tensors", write)

    def commit() -> None:
        if world.is_main:
            manifest = {
                "format": FORMAT,
                "world_size": world.size,
                "differs_by_rank": differing,
                "optimizer": _optimizer_name(state),
                "transforms": [each.name for each in state.setup],
                "data": None if state.data is None else state.data.facts,
                "files": [digest for digest in digests if digest],
            }
            _write_flushed(partial / _MANIFEST, _sealed(manifest))
            _flush_directory(partial)
            partial.rename(final)
            _flush_directory(final.parent)

    _agreed(state, "commit", commit)


def load(
    state: TrainState, directory: str | os.PathLike[str], *, allow: Sequence[str] = ()
) -> TrainState:
    """Return the saved state, with the definition of the given one; call it on all ranks.

    Any number of ranks goes on at the very same sample. Other data do not: their length,
    batch size, order and fingerprint (a hash of some samples) must be those of the save.

    Args:
        state: says model, optimizer, setup, data and world; it is not changed.
        directory: that `save` wrote.
        allow: what may differ in the data, of "samples", "batch_size", "remainder",
            "order" and "fingerprint".

    Raises:
        CheckpointError: a file is missing, changed or of another format, or model,
            transforms, data or world differ from what was saved; the differences are listed.
    """
    state.lease.check()
    folder = Path(directory)
    manifest = _read_manifest(folder)
    rank = _rank_to_read(state, manifest, folder)
    saved = _read_rank(folder, rank, manifest["files"], str(state.world.device))
    _check_transforms(state, manifest, saved, folder)
    if manifest["optimizer"] != _optimizer_name(state):
        msg = (
            f"{folder} holds the state of {manifest['optimizer']}, but this state's"
            f" optimizer is {_optimizer_name(state)}."
        )
        raise CheckpointError(msg)
    _check_data(state, manifest, folder, allow)
    for field, current in (("params", state.params), ("buffers", state.buffers)):
        _check_tensors(f"{folder}: {field}", saved[field], current)
    return with_fields(state, saved)


def with_fields(state: TrainState, saved: Mapping[str, Any]) -> TrainState:
    """Return the state that was saved, with the definition of this one."""
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


def fields_of(state: TrainState) -> dict[str, Any]:
    """Return what is saved of a state, as a tree of tensors and plain data."""
    return {
        "params": dict(state.params),
        "buffers": dict(state.buffers),
        "opt_state": {name: dict(entry) for name, entry in state.opt_state.items()},
        "step": state.step,
        "cursor": state.cursor.to_plain(),
        "seed": state.seed,
        "slots": dict(state.slots),
    }


def _optimizer_name(state: TrainState) -> str:
    kind = type(state.definition.optimizer)
    return f"{kind.__module__}.{kind.__qualname__}"


def _rank_file(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def _prints(
    fields: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
) -> dict[str, str]:
    """Return what tells a field's values on one rank from those on another."""
    sums = {key: int(checksum(tensor)) for key, tensor in tensors.items()}

    def print_of(coded: Any) -> str:
        text = json.dumps(coded)
        for key in re.findall(r'{"tensor": "(t\d+)"}', text):
            text += f" {key}={sums[key]}"
        return hashlib.sha256(text.encode()).hexdigest()

    return {field: print_of(coded) for field, coded in fields.items()}


def _rank_to_read(state: TrainState, manifest: Mapping[str, Any], folder: Path) -> int:
    """Return whose file this rank reads."""
    world, differing = state.world, manifest["differs_by_rank"]
    if not differing:
        return 0
    if manifest["world_size"] == world.size:
        return world.rank
    if differing == ["buffers"]:
        return 0
    msg = (
        f"{folder} was saved on {manifest['world_size']} ranks whose {', '.join(differing)}"
        f" differed; this world has {world.size}. Load it on as many, or save where ranks"
        " agree: after af.finalize(state), with local_sgd(opt_state=True) where the optimizer"
        " has state."
    )
    raise CheckpointError(msg)


def _agreed(state: TrainState, what: str, act: Callable[[], str | None]) -> list[str]:
    """Run `act` on every rank and return all results, or raise on every rank."""
    failure: Exception | None = None
    try:
        outcome = f"ok {act() or ''}"
    except (
        OSError,
        CheckpointError,
        PlainDataError,
        safetensors.SafetensorError,
    ) as error:
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


def _write_rank(
    fields: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], path: Path
) -> str:
    """Write one rank's fields and tensors, flushed to the disk; return the SHA-256."""
    data = pack(fields, tensors)
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
    if not path.exists():
        msg = f"There is no checkpoint at {folder}: it has no {_MANIFEST}."
        raise CheckpointError(msg)
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


def _read_rank(
    folder: Path, rank: int, digests: list[str], device: str
) -> dict[str, Any]:
    """Return the fields that one rank wrote, verified."""
    path = folder / _rank_file(rank)
    try:
        data = path.read_bytes()
    except OSError as error:
        msg = f"{path} cannot be read: {error}"
        raise CheckpointError(msg) from error
    if rank >= len(digests) or hashlib.sha256(data).hexdigest() != digests[rank]:
        msg = (
            f"{path} is not what was saved: its SHA-256 differs from the manifest's."
            " Load another checkpoint."
        )
        raise CheckpointError(msg)
    fields, tensors = unpack(data, device)
    return {field: decode(coded, tensors) for field, coded in fields.items()}


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


def _check_data(
    state: TrainState, manifest: Mapping[str, Any], folder: Path, allow: Sequence[str]
) -> None:
    """Refuse to go on with other data."""
    saved = manifest.get("data")
    if saved is None or state.data is None:
        return
    facts = state.data.facts
    names = dict.fromkeys((*saved, *facts))
    unknown = sorted(set(allow) - names.keys())
    if unknown:
        msg = f"af.load(allow={tuple(allow)!r}): expected some of {tuple(names)}."
        raise ArgumentError(msg)
    changed = [
        name
        for name in names
        if name not in allow and saved.get(name) != facts.get(name)
    ]
    if changed:
        listed = "\n".join(
            f"  {name}: {saved.get(name)!r}, now {facts.get(name)!r}"
            for name in changed
        )
        msg = (
            f"{folder} was saved with other data:\n{listed}\nIf that is meant, say so:"
            f" af.load(..., allow={tuple(changed)!r})."
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
