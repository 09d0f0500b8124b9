# SPDX-License-Identifier: Apache-2.0
"""`import_state`: import a training state that Accelerate, DeepSpeed or torch saved."""

import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import attrs

from accelfn import TrainState
from accelfn.errors import ArgumentError, CheckpointCorruptError, CheckpointError
from accelfn.plug import arguments, check_state, files, load, save
from accelfn.weights import deepspeed, export, foreign, torch_files

OPTIMIZER = "optimizer.bin"
MODELS = (
    "model.safetensors",
    "model.safetensors.index.json",
    torch_files.WEIGHTS,
    torch_files.INDEX,
)
"""Names of model files. If a folder has several of them, the first in this list is read."""


def weights_of(folder: Path) -> Mapping[str, foreign.Saved]:
    """Return the tensors of the model that a folder contains, by name."""
    if not any(arguments.exists(folder / name) for name in MODELS[:2]):
        return torch_files.state_dict_of(folder)
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

    A state dict without parameter names numbers the parameters by position. If its group sizes
    equal those of the state's optimizer, the positions are those of that optimizer's groups. If it
    has one group with as many parameters as the model, frozen parameters included, the positions
    are those of the model's parameters.

    Args:
        file: a file that `torch.save(optimizer.state_dict(), file)` wrote.
        groups: the parameter names in each group of the state's optimizer.
        every: the names of all parameters of the model.

    Raises:
        CheckpointError: the file is not such a state dict, or its groups have other sizes.
    """
    state_dict = torch_files.load_plain(file, "Save only optimizer.state_dict().")
    kinds = AttributeError, IndexError, KeyError, TypeError
    with export.raise_corrupt(
        f"{file} is not the state_dict() of an optimizer", *kinds
    ):
        positions = [[*g["params"]] for g in state_dict["param_groups"]]
        group_names = [g.get("param_names") for g in state_dict["param_groups"]]
        state = {
            place: {str(key): value for key, value in entry.items()}
            for place, entry in state_dict["state"].items()
        }
        sizes, own_sizes = list(map(len, positions)), list(map(len, groups))
        named = [len(n or ()) for n in group_names]
    if all(group_names):
        if named != sizes:
            msg = f"{file} has parameter groups of sizes {sizes}, but {named} parameter names."
            raise CheckpointCorruptError(msg)
        names = group_names
    elif sizes == own_sizes:
        names = groups
    elif sizes == [len(every)]:
        names = [every]
    else:
        msg = (
            f"{file} has parameter groups of sizes {sizes}, but the state's optimizer has"
            f" {own_sizes}. The file numbers parameters by position, so the sizes must be equal."
            " Create the state with an optimizer that has the groups of the file."
        )
        raise CheckpointError(msg)
    by_place = {
        place: str(name)
        for places, group in zip(positions, names, strict=True)
        for place, name in zip(places, group, strict=True)
    }
    return {by_place[place]: e for place, e in state.items() if place in by_place}


# `import_state`: import a training state that another library saved.


_FSDP = ("pytorch_model_fsdp_0", "optimizer_0")
"""The folders of FSDP's sharded checkpoints in a folder that Accelerate saved."""


def import_state(
    state: TrainState,
    directory: str | os.PathLike[str],
    *,
    under: str | None = None,
    strict: bool = True,
) -> load.Loaded:
    """Import a model and its optimizer's state that another library saved.

    Call this on all ranks. Three formats are supported:

    - torch's distributed checkpoints: `torch.distributed.checkpoint.save`, with the names of
      `get_state_dict`.
    - DeepSpeed's `save_checkpoint` at ZeRO stages 1, 2 and 3. The fp32 weights are read, and
      DeepSpeed need not be installed.
    - Folders of Accelerate's `save_state`, also with FSDP's sharded checkpoints or DeepSpeed.

    Files cannot run code: a pickle may contain only tensors, plain data and torch's records of
    tensors. Any other object raises an error.

    The new state's slots are created again from the imported parameters; for example, an average
    starts again. Its `step` is the optimizer's count of updates. Without such a count, it is
    `step` of a distributed checkpoint, or DeepSpeed's own count. If the counts of parameters
    differ, `step` is the largest, with an `AccelfnWarning`. Without any count, `step` does not
    change, and is reported as `missing`. `cursor` and `seed` do not change, because the other
    libraries do not save them.

    Args:
        state: a state with the model, optimizer, setup and world; it is not changed.
        directory: the folder of the checkpoint. For DeepSpeed, the folder that contains the file
            `latest`, or the folder of a tag.
        under: for a distributed checkpoint, the key of the model, such as "model". Default: the
            only key that contains a model.
        strict: whether missing and unexpected names raise an error; False only warns.

    Returns: a report with the new `state`, and with the names that were `loaded`, `cast` to
    another dtype, `missing`, or `unexpected`, such as schedulers and random generators.

    Law: training continues from the saved state, under any layout. The result is bitwise the same
    if one process saved the checkpoint and one process continues.

    Cost: each rank reads only its own shards, one tensor at a time. Slices of less than 4 KiB, as
    in a tensor that is sharded in its last dim, are read with the gaps between them. Files of
    `torch.save`, such as those of an optimizer or of DeepSpeed, are memory-mapped.

    Raises:
        CheckpointError: names, shapes or the optimizer differ (the message has the most similar
            names), several keys contain a model, or the folder has no supported files.
        CheckpointCorruptError: a file is missing, truncated, or from another save.
        ArgumentError: `under` is not a string.
    """
    if under is not None and not isinstance(under, str):
        msg = f"af.import_state(under={under!r}): expected a str such as 'model', or None."
        raise ArgumentError(msg)
    call = "af.import_state(state, directory)"
    check_state(call, state)
    state.lease.check()
    folder = arguments.as_path(call, directory, "a folder")

    def read() -> tuple[dict[str, Any], load.Loaded]:
        source = _find_training(state, folder, under)
        return foreign.read_fields(state, folder, source, strict=strict)

    fields, report = load.read_all_or_none(state, read)
    new = save.with_fields(state, fields).with_setup(state.setup)
    return attrs.evolve(report, state=new)


def _find_training(state: TrainState, folder: Path, under: str | None) -> foreign.Found:
    """Find the tensors of a saved training state in a folder of any supported format.

    Raises:
        CheckpointError: the folder has no supported files.
    """
    parts = [folder, *(folder / name for name in _FSDP)]
    parts = [part for part in parts if arguments.exists(part / torch_files.METADATA)]
    params = [*state.params, *state.definition.skeleton.aliases]
    if parts:
        return torch_files.found_in(folder, parts, params=params, under=under)
    tag = deepspeed.parts_at(folder)
    if tag is not None:
        return deepspeed.found_in(folder, tag, params=params)
    if any(arguments.exists(folder / name) for name in MODELS):
        return _of_accelerate(state, folder)
    msg = (
        f"{folder} has no {torch_files.METADATA} of a torch distributed checkpoint, no files of"
        f" DeepSpeed, and no model that Accelerate saved.{files.reader_of(folder)}"
    )
    raise CheckpointError(msg)


def _of_accelerate(state: TrainState, folder: Path) -> foreign.Found:
    """Find the tensors of a training state in a folder of Accelerate's `save_state`."""
    weights = weights_of(folder)
    metas = dict(state.definition.skeleton.module.named_parameters())
    names_by_id = {id(meta): name for name, meta in metas.items()}
    groups = [
        [names_by_id[id(param)] for param in group["params"]]
        for group in state.definition.optimizer.param_groups
    ]
    file = folder / OPTIMIZER
    entries = entries_of(file, groups, [*metas]) if arguments.exists(file) else {}
    names = {path.name for path in folder.iterdir()} - {*MODELS, OPTIMIZER}
    return foreign.Found(weights=weights, entries=entries, left=tuple(sorted(names)))
