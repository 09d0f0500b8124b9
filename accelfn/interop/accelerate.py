# SPDX-License-Identifier: Apache-2.0
"""`import_state`: import training states of Accelerate, DeepSpeed and torch."""

import os
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

from accelfn import TrainState
from accelfn.errors import ArgumentError, CheckpointCorruptError, CheckpointError
from accelfn.interop import deepspeed, torch_files
from accelfn.plug import arguments, export, files, foreign

OPTIMIZER = "optimizer.bin"
MODELS = (
    "model.safetensors",
    "model.safetensors.index.json",
    torch_files.WEIGHTS,
    torch_files.INDEX,
)
"""Names of model files; the first that a folder has is read."""


def weights_of(folder: Path) -> dict[str, foreign.Piece]:
    """Return the tensors of a folder's model."""
    if not any(arguments.exists(folder / name) for name in MODELS[:2]):
        tensors = torch_files.state_dict_of(folder)
        return {name: foreign.Piece.of(tensor) for name, tensor in tensors.items()}
    shards = export.open_weights(folder)
    return {
        name: foreign.Piece(
            meta.dtype, tuple(meta.shape), partial(shards.read_box, name)
        )
        for name, meta in shards.tensors().items()
    }


def entries_of(
    file: Path, groups: Sequence[Sequence[str]], every: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """Read an optimizer's state dict, and return its entries by parameter name.

    A state dict numbers parameters by position. Positions are those of the state's optimizer,
    group by group; or those of all parameters of the model, frozen ones included, if there is
    one group of that size.

    Args:
        file: a file that `torch.save(optimizer.state_dict(), file)` wrote.
        groups: the parameter names in each group of the state's optimizer.
        every: the names of all parameters of the model.

    Raises:
        CheckpointError: the file has other contents, or groups of other sizes.
    """
    state_dict = torch_files.load_plain(file, "Save optimizer.state_dict() alone.")
    try:
        positions = [[*g["params"]] for g in state_dict["param_groups"]]
        group_names = [g.get("param_names") for g in state_dict["param_groups"]]
        entries = cast("Mapping[Any, Mapping[str, Any]]", state_dict["state"])
        state = {place: {**entry} for place, entry in entries.items()}
        sizes, own_sizes = list(map(len, positions)), list(map(len, groups))
        named = [len(n or ()) for n in group_names]
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        msg = f"{file} is not the state_dict() of an optimizer: {error!r}."
        raise CheckpointCorruptError(msg) from error
    if all(group_names):
        if named != sizes:
            msg = (
                f"{file} has groups of {sizes} parameters, and {named} names for them."
            )
            raise CheckpointCorruptError(msg)
        names = group_names
    elif sizes == own_sizes:
        names = groups
    elif sizes == [len(every)]:
        names = [every]
    else:
        msg = (
            f"{file} has groups of {sizes} parameters, and the state's optimizer of {own_sizes}: it"
            " goes by positions, which cannot be told. Give the state an optimizer with such"
            " groups."
        )
        raise CheckpointError(msg)
    pairs = (
        pair
        for places, group in zip(positions, names, strict=True)
        for pair in zip(places, group, strict=True)
    )
    by_place = {place: str(name) for place, name in pairs}
    return {
        by_place[place]: {
            str(key): foreign.Piece.of(value)
            if isinstance(value, torch.Tensor)
            else value
            for key, value in entry.items()
        }
        for place, entry in state.items()
        if place in by_place
    }


# `import_state`: import the training state that another library saved.


_FSDP = ("pytorch_model_fsdp_0", "optimizer_0")
"""Folders of Accelerate with FSDP's sharded checkpoints."""


def import_state(
    state: TrainState,
    directory: str | os.PathLike[str],
    *,
    under: str | None = None,
    strict: bool = True,
) -> foreign.Loaded:
    """Import a model and optimizer that another library saved; call it on all ranks.

    Reads torch's distributed checkpoints (`torch.distributed.checkpoint.save`, with names of
    `get_state_dict`); DeepSpeed's `save_checkpoint` at ZeRO stages 1, 2 and 3 (the fp32
    weights, without DeepSpeed installed); and folders of Accelerate's `save_state`, also with
    FSDP's sharded checkpoints and with DeepSpeed. No file can run code: pickles may hold
    tensors, plain data and torch's records of tensors, and anything else raises an error.

    Slots of transforms restart from the imported values, as an average does. `step` is the
    optimizer's count of updates, or `step` of a distributed checkpoint, or DeepSpeed's count if
    its optimizer does not count. If the counts of parameters differ, `step` is the largest, and
    an `AccelfnWarning` says so. Without a count, the state keeps its `step`, reported as `missing`.
    Other libraries do not save a position in the data as accelfn does, so the state keeps its
    `cursor` and `seed`.

    Args:
        state: provides model, optimizer, setup and world; it is not changed.
        directory: the folder of the save; for DeepSpeed, the folder with `latest`, or the
            folder of a tag.
        under: for a distributed checkpoint, the key of the model, such as "model"; default:
            the only key that holds a model.
        strict: False only warns about names that are missing or unexpected.

    Returns: a report with the new `state`, the names that were `loaded` and `cast`, the
    `missing` names, and the `unexpected` ones, such as schedulers and random generators.

    Law: the state continues the saved training under any layout; bitwise if one process saved
    and one process continues.

    Cost: each rank reads its own parts, a tensor at a time. Runs of less than 4 KiB, as in a
    tensor that is sharded in its last dim, are read with the gaps between them. Files that
    `torch.save` wrote, such as an optimizer or DeepSpeed's files, are memory-mapped.

    Raises:
        CheckpointError: names, shapes or the optimizer differ (the error gives the nearest
            names), several keys hold a model, or the folder has no supported files.
        CheckpointCorruptError: a file is missing, truncated, or from another save.
        ArgumentError: `under` is not a text.
    """
    if under is not None and not isinstance(under, str):
        msg = f"af.import_state(under={under!r}): expected a key, as 'model', or None."
        raise ArgumentError(msg)
    call = "af.import_state(state, directory)"
    find = partial(_find_training, state, under=under)
    return foreign.load_found(call, state, directory, find, strict=strict)


def _find_training(state: TrainState, folder: Path, under: str | None) -> foreign.Found:
    """Return the tensors of a training in a folder of any supported format.

    Raises:
        CheckpointError: the folder has no supported files.
    """
    parts = [folder, *(folder / name for name in _FSDP)]
    split = [part for part in parts if arguments.exists(part / torch_files.METADATA)]
    if split:
        return _in_parts(state, folder, split, under)
    tag = deepspeed.parts_at(folder)
    if tag is not None:
        params = _params(state)
        names = {*params, *state.buffers}
        return deepspeed.found_in(folder, tag, params=params, names=names)
    if any(arguments.exists(folder / name) for name in MODELS):
        return _of_accelerate(state, folder)
    msg = (
        f"{folder} has neither {torch_files.METADATA}, of torch's distributed checkpoints, nor"
        f" parts of DeepSpeed's, nor a model as Accelerate saves it.{files.reader_of(folder)}"
    )
    raise CheckpointError(msg)


def _in_parts(
    state: TrainState, folder: Path, split: Iterable[Path], under: str | None
) -> foreign.Found:
    """Return the tensors of a training in distributed checkpoints."""
    pieces, extras = dict[str, foreign.Piece](), list[str]()
    for part in split:
        some, rest = torch_files.pieces_of(part)
        pieces |= some
        extras += rest
    params = _params(state)
    names = {*params, *state.buffers}
    return torch_files.found_in(
        folder, pieces, extras, params=params, names=names, under=under
    )


def _of_accelerate(state: TrainState, folder: Path) -> foreign.Found:
    """Return the tensors of a training in a folder of `save_state`."""
    weights = weights_of(folder)
    names = {*_params(state), *state.buffers}
    metas = dict(state.definition.skeleton.module.named_parameters())
    names_by_id = {id(meta): name for name, meta in metas.items()}
    groups = [
        [names_by_id[id(param)] for param in group["params"]]
        for group in state.definition.optimizer.param_groups
    ]
    file = folder / OPTIMIZER
    entries = entries_of(file, groups, [*metas]) if arguments.exists(file) else {}
    read = {*MODELS, OPTIMIZER}
    return foreign.Found(
        weights={n: piece for n, piece in weights.items() if n in names},
        entries=entries,
        strange=tuple(name for name in weights if name not in names),
        left=tuple(sorted(p.name for p in folder.iterdir() if p.name not in read)),
    )


def _params(state: TrainState) -> list[str]:
    """Return all names of parameters, including names of tied parameters."""
    return [*state.params, *state.definition.skeleton.aliases]
