# SPDX-License-Identifier: Apache-2.0
"""Folders that DeepSpeed's ZeRO wrote: where the newest is, and what a training finds there.

In which order and in which shapes parameters lie in flat groups, a file of the model says.
"""

import math
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch

from accelfn.base import paths
from accelfn.errors import CheckpointCorruptError, CheckpointError
from accelfn.weights.pieces import Found, Piece
from accelfn.weights.zero_groups import put_together, shapes_of
from accelfn.weights.zero_parts import PART_FILE, WHOLE, Part, loaded, parts_of

LATEST = "latest"
_SCRIPTS = {"zero_to_fp32.py", "zero_to_torch.py"}
_MODEL = re.compile(
    r"(?:zero_pp_rank_(?P<rank>\d+)_)?mp_rank_(?P<mp>\d+)_model_states\.pt"
)
_COUNTED = {
    *("module", "buffer_names", "optimizer", "param_shapes", "shared_params"),
    *("frozen_param_shapes", "frozen_param_fragments", "ds_config", "ds_version"),
    *("global_steps", "skipped_steps", "global_samples", "dp_world_size"),
    *("mp_world_size", "checkpoint_parallel_dimensions"),
}
"""What a file of the model has of its own; the rest are schedulers, and what users add."""


def parts_at(folder: Path) -> Path | None:
    """Return the folder in which the parts lie: this one, or the newest in it; or None.

    Raises:
        CheckpointError: there are some, and none is the newest; or that one is not there.
    """
    if _has_parts(folder):
        return folder
    if not paths.is_directory(folder):
        return None
    tags = sorted(each.name for each in folder.iterdir() if _has_parts(each))
    latest = folder / LATEST
    if paths.is_file(latest):
        said = latest.read_bytes()[:1000].decode(errors="replace").strip()
        if said in tags:
            return folder / said
        msg = (
            f"{latest} says that {said!r} is the newest, and such folders of DeepSpeed there"
            f" are {tags or 'none'}. Import one of these, or copy the folder as a whole."
        )
        raise CheckpointCorruptError(msg)
    if tags:
        newest = str(folder / tags[-1])
        msg = (
            f"{folder} has folders of DeepSpeed, {tags}, and no file {LATEST!r} that says"
            f" which is meant. Name it: af.import_state(state, {newest!r})."
        )
        raise CheckpointError(msg)
    return None


def _has_parts(folder: Path) -> bool:
    return paths.is_directory(folder) and any(
        each.name.endswith(("_optim_states.pt", "model_states.pt"))
        for each in folder.iterdir()
    )


def found_in(
    folder: Path, tag: Path, *, params: Collection[str], names: Collection[str]
) -> Found:
    """Return what there is of a training in a folder of DeepSpeed.

    Args:
        folder: that was given.
        tag: in which the parts lie; the same, or one in it.
        params: the names of the model's parameters.
        names: those and the names of its buffers.

    Raises:
        CheckpointError: it was saved in a way that is not read.
        CheckpointCorruptError: a rank's file is missing, cut off, or another save's.
    """
    files = sorted(each.name for each in tag.iterdir())
    _check_kind(tag, files)
    try:
        parts = parts_of(tag, files)
        model, weights = _model(tag, parts)
        masters, kept = put_together(tag, parts, model["param_shapes"])
        steps = int(model["global_steps"]) - int(model["skipped_steps"])
        shared = dict(model.get("shared_params") or {})
    except CheckpointError:
        raise
    except Exception as error:  # bytes at random end in any of them
        msg = f"{tag} does not hold what DeepSpeed's ZeRO saves: {error!r}."
        raise CheckpointCorruptError(msg) from error
    weights |= masters
    weights |= {name: weights[own] for name, own in shared.items() if own in weights}
    left = [str(key) for key in model if key not in _COUNTED and model[key] is not None]
    left += ["loss_scaler"] if any(part.is_scaled for part in parts) else []
    left += [n for n in files if not (PART_FILE.fullmatch(n) or _MODEL.fullmatch(n))]
    if tag != folder:
        beside = {each.name for each in folder.iterdir()} - {LATEST, tag.name}
        left += sorted(beside - _SCRIPTS)
    return Found(
        weights={name: each for name, each in weights.items() if name in names},
        entries={name: each for name, each in kept.items() if name in params},
        step=None if any("step" in each for each in kept.values()) else steps,
        strange=tuple(name for name in weights if name not in names),
        left=tuple(left),
    )


def _check_kind(tag: Path, files: Sequence[str]) -> None:
    """Refuse what is cut by more than the ranks of data.

    Raises:
        CheckpointError: and it says by what.
    """
    matches = [PART_FILE.fullmatch(name) or _MODEL.fullmatch(name) for name in files]
    several = {match["mp"] for match in matches if match and int(match["mp"])}
    said = ""
    if any(each.startswith("expp_rank_") or "_expert_" in each for each in files):
        said = "has a mixture of experts, which are cut over ranks of their own"
    elif any(each.startswith("layer_") for each in files):
        said = "was saved by a pipeline, by the layers of its stages"
    elif several:
        said = (
            f"is of a model that was split over ranks, as mp_rank_{min(several)} says"
        )
    elif "offloaded_tensors" in files:
        said = "has an optimizer whose tensors were on NVMe, in files of their own"
    elif "zero" in files and not any(PART_FILE.fullmatch(each) for each in files):
        said = "is a universal checkpoint; the folder it was made from is read"
    if said:
        msg = (
            f"{tag} {said}: af.import_state reads what DeepSpeed's ZeRO saves of plain models,"
            " at its stages 1, 2 and 3. Write the weights with DeepSpeed's own tools, as one"
            " state dict, for af.import_torch_weights."
        )
        raise CheckpointError(msg)


def _model(
    tag: Path, parts: Sequence[Part]
) -> tuple[Mapping[str, Any], dict[str, Piece]]:
    """Return what is said of the model, and what of it no optimizer has."""
    cuts_each = parts[0].cuts_each
    each = "zero_pp_rank_{}_mp_rank_00_model_states.pt"
    names = [each.format(rank) for rank in range(len(parts))]
    names = names if cuts_each else ["mp_rank_00_model_states.pt"]
    for name in names:
        if not paths.exists(tag / name):
            msg = f"{tag} has no {name}, which a rank wrote of the model. {WHOLE}"
            raise CheckpointCorruptError(msg)
    model = loaded(tag / names[0])
    if model.get("param_shapes") is None:
        msg = (
            f"{tag / names[0]} does not say how parameters lie; it has {sorted(model)}."
        )
        raise CheckpointCorruptError(msg)
    module = cast("Mapping[str, torch.Tensor]", model["module"])
    if not cuts_each:
        return model, {name: Piece.of(tensor) for name, tensor in module.items()}
    weights = {name: Piece.of(module[name]) for name in model["buffer_names"]}
    shapes = shapes_of(model.get("frozen_param_shapes") or {})
    if shapes:
        others = [loaded(tag / name) for name in names[1:]]
        held = [said["frozen_param_fragments"] for said in (model, *others)]
        for name, shape in shapes.items():
            runs, open_ = list[torch.Tensor](), math.prod(shape)
            for fragments in held:
                runs.append(fragments[name][:open_])
                open_ -= len(runs[-1])
            weights[name] = Piece.of_runs(shape, runs)
    return model, weights
