# SPDX-License-Identifier: Apache-2.0
"""Folders that Accelerate's `save_state` wrote: a model by name, its optimizer by position."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

from accelfn.base import paths
from accelfn.errors import CheckpointCorruptError, CheckpointError
from accelfn.weights import shards, torch_files
from accelfn.weights.pieces import Piece

OPTIMIZER = "optimizer.bin"
MODELS = (shards.WEIGHTS, shards.INDEX, torch_files.WEIGHTS, torch_files.INDEX)
"""What a folder has of these is its model; the first of them is read."""


def weights_of(folder: Path) -> dict[str, Piece]:
    """Return the tensors of a folder's model."""
    if not any(paths.exists(folder / name) for name in MODELS[:2]):
        held = torch_files.state_dict_of(folder)
        return {name: Piece.of(tensor) for name, tensor in held.items()}
    there = shards.shards_at(folder)
    return {
        name: Piece(meta.dtype, tuple(meta.shape), partial(there.read_box, name))
        for name, meta in there.tensors().items()
    }


def entries_of(
    file: Path, groups: Sequence[Sequence[str]], every: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """Return what an optimizer's state dict keeps of each parameter, by its name.

    A state dict goes by positions. They are those of the state's optimizer, group by group;
    or of all the model's parameters, the frozen ones too, where there is one group of so many.

    Args:
        file: that `torch.save(optimizer.state_dict(), file)` wrote.
        groups: the names of the parameters in each of the groups of the state's optimizer.
        every: the names of all parameters of the model.

    Raises:
        CheckpointError: it holds something else, or groups of other sizes.
    """
    held = torch_files.loaded(file, "Save optimizer.state_dict() alone.")
    try:
        saved = [[*each["params"]] for each in held["param_groups"]]
        told = [each.get("param_names") for each in held["param_groups"]]
        entries = cast("Mapping[Any, Mapping[str, Any]]", held["state"])
        state = {place: {**entry} for place, entry in entries.items()}
        sizes, own = [len(each) for each in saved], [len(each) for each in groups]
        named = [len(each or ()) for each in told]
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        msg = f"{file} is not the state_dict() of an optimizer: {error!r}."
        raise CheckpointCorruptError(msg) from error
    if all(told):
        if named != sizes:
            msg = (
                f"{file} has groups of {sizes} parameters, and {named} names for them."
            )
            raise CheckpointCorruptError(msg)
        names = told
    elif sizes == own:
        names = groups
    elif sizes == [len(every)]:
        names = [every]
    else:
        msg = (
            f"{file} has groups of {sizes} parameters, and the state's optimizer of {own}: it"
            " goes by positions, which cannot be told. Give the state an optimizer with such"
            " groups."
        )
        raise CheckpointError(msg)
    pairs = (
        pair
        for some, called in zip(saved, names, strict=True)
        for pair in zip(some, called, strict=True)
    )
    by_place = {place: str(name) for place, name in pairs}
    return {
        by_place[place]: {
            str(key): Piece.of(value) if isinstance(value, torch.Tensor) else value
            for key, value in entry.items()
        }
        for place, entry in state.items()
        if place in by_place
    }
