# SPDX-License-Identifier: Apache-2.0
"""Read checkpoints of DeepSpeed's ZeRO; DeepSpeed need not be installed.

Each rank saved its part of ZeRO's flat tensors in an optimizer file. The model file has the order
and the shapes of the parameters in the flat tensors.
"""

import itertools
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, cast

import attrs
import torch

from accelfn.errors import CheckpointCorruptError, CheckpointError
from accelfn.plug import arguments
from accelfn.weights import export, foreign, torch_files

# The optimizer files of ZeRO: each rank saved its part of the flat tensor of each parameter group.
#
# The files refer to a few classes of DeepSpeed. Inert placeholders replace objects of these
# classes, so DeepSpeed is not imported.


PART_FILE = re.compile(
    r"(?:\w+_)?zero_pp_rank_(?P<rank>\d+)_mp_rank_(?P<mp>\d+)_optim_states\.pt"
)
_SHUT = (
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
)
"""Classes of DeepSpeed whose objects are replaced by placeholders, such as loss scalers."""
_ADVICE = (
    "Save with a client_state and schedulers of plain data. Or, if you trust the author of the"
    " file, convert the weights with the script zero_to_fp32.py in the checkpoint's folder, and"
    " load them with af.import_torch_weights."
)
WHOLE = "Copy the complete folder, with the files of all machines."


@attrs.frozen(eq=False)
class Part:
    """The contents of one rank's optimizer file.

    Attributes:
        file: the rank's file.
        cuts_each: whether each parameter is sharded separately, as in stage 3.
        counts: for each parameter group, the number of ranks that share the group; all should
            be equal.
        masters: the rank's fp32 weights: a flat tensor for each parameter group.
        entries: the optimizer's state for each of these flat tensors.
        paddings: for each group, the elements of padding after each parameter; () without padding.
        is_scaled: whether training used a dynamic loss scale, which is not imported.
    """

    file: Path
    cuts_each: bool
    counts: frozenset[int]
    masters: tuple[torch.Tensor, ...]
    entries: tuple[Mapping[str, Any], ...]
    paddings: tuple[tuple[int, ...], ...]
    is_scaled: bool


def parts_of(tag: Path, files: Iterable[str]) -> list[Part]:
    """Read the optimizer files of all ranks, in rank order.

    Raises:
        CheckpointError: the folder has no optimizer files.
        CheckpointCorruptError: the file of a rank is missing, or files are from another save.
    """
    by_rank = {int(m["rank"]): m[0] for m in map(PART_FILE.fullmatch, files) if m}
    if not by_rank:
        msg = (
            f"{tag} has no *_optim_states.pt files. It was saved with ZeRO stage 0, or files are"
            " missing. af.import_state reads ZeRO stages 1, 2 and 3. " + WHOLE
        )
        raise CheckpointError(msg)
    ranks = sorted(by_rank)
    parts = [_part(tag / by_rank[rank]) for rank in ranks]
    for part in parts:
        count = max(part.counts)
        missing = sorted({*range(count)} - {*ranks})
        if missing:
            name = by_rank[ranks[0]].replace(f"rank_{ranks[0]}_", f"rank_{missing[0]}_")
            msg = (
                f"{part.file} is one of {count} files, but only those of ranks {ranks} exist:"
                f" {name} is missing. {WHOLE}"
            )
            raise CheckpointCorruptError(msg)
        if part.counts != {len(parts)} or part.cuts_each != parts[0].cuts_each:
            counts = sorted(part.counts)
            msg = (
                f"{part.file} is one of {counts[0] if len(counts) == 1 else counts} files, but"
                f" {tag} has {len(parts)}: some files are from a save with another number of"
                " ranks. Remove those files, or use a folder with only one save."
            )
            raise CheckpointCorruptError(msg)
    return parts


def _part(file: Path) -> Part:
    part = load_file(file)["optimizer_state_dict"]
    cuts_each = "fp32_flat_groups" in part
    key = "fp32_flat_groups" if cuts_each else "single_partition_of_fp32_groups"
    if key not in part:
        msg = f"{file} has no weights: the key {key!r} is missing among {sorted(part)}."
        raise CheckpointCorruptError(msg)
    masters = tuple(part[key])
    inner = part["optimizer_state_dict" if cuts_each else "base_optimizer_state"]
    entries = tuple(_entries_of_groups(inner))
    count = part["partition_count"]
    counts = frozenset(map(int, count if isinstance(count, list) else [count]))
    flat = all(isinstance(m, torch.Tensor) and m.ndim == 1 for m in masters)
    if not flat or len(entries) != len(masters) or not counts:
        msg = (
            f"{file} has {len(masters)} flat tensors of weights, and {len(entries)} entries of"
            " the optimizer: DeepSpeed's ZeRO does not write such a file."
        )
        raise CheckpointCorruptError(msg)
    paddings = part.get("param_alignment_paddings") or ()
    return Part(
        file=file,
        cuts_each=cuts_each,
        counts=counts,
        masters=masters,
        entries=entries,
        paddings=tuple(tuple(map(int, padding)) for padding in paddings),
        is_scaled=bool(part.get("dynamic_loss_scale")),
    )


def _entries_of_groups(inner: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the optimizer's state of each flat tensor, with the update count of its group."""
    if isinstance(inner, list):  # the format of ZeRO's "elastic" checkpoints
        yield from cast("list[dict[str, Any]]", inner)
        return
    for group in inner["param_groups"]:
        common = {"step": group["step"]} if "step" in group else {}
        for place in group["params"]:
            entry = inner["state"].get(place)
            yield {**common, **entry} if entry else {}


def load_file(file: Path) -> Mapping[str, Any]:
    """Read a file that DeepSpeed saved, with placeholders for objects of DeepSpeed."""
    return torch_files.load_plain(file, _ADVICE, shut=_SHUT)


# Assemble parameters from the flat tensors of all ranks.
#
# Stages 1 and 2 concatenate the parameters of a group, with padding, and each rank has an equal
# part of the result. Stage 3 splits each parameter into one flat shard per rank, and each rank
# concatenates its shards. The optimizer's state has the same layout as the weights.


_Place: TypeAlias = tuple[int, int, int]
"""Contiguous elements of a parameter: their rank, offset in its flat tensor, and length."""


def shapes_of(shapes: Mapping[str, Iterable[int]]) -> dict[str, tuple[int, ...]]:
    """Convert the shapes in a model file to tuples of integers, by parameter name."""
    return {str(name): tuple(map(int, shape)) for name, shape in shapes.items()}


def put_together(
    tag: Path, parts: Sequence[Part], groups: Sequence[Mapping[str, Iterable[int]]]
) -> tuple[dict[str, foreign.Piece], dict[str, dict[str, Any]]]:
    """Return the weights and the optimizer's state, by parameter name.

    Args:
        tag: the checkpoint's folder, for error messages.
        parts: the optimizer files of all ranks.
        groups: the shapes of the parameters of each parameter group, from the model file.

    Raises:
        CheckpointCorruptError: the groups or their sizes do not match the model.
    """
    weights: dict[str, foreign.Piece] = {}
    entries: dict[str, dict[str, Any]] = {}
    for part in parts:
        if len(part.masters) != len(groups):
            msg = (
                f"{part.file} has {len(part.masters)} parameter groups, but the model file has"
                f" {len(groups)}: the files are from different saves."
            )
            raise CheckpointCorruptError(msg)
    for index, group in enumerate(groups):
        shapes = shapes_of(group)
        masters = [part.masters[index] for part in parts]
        sizes = [len(master) for master in masters]
        if parts[0].cuts_each:
            places = _cut_each(shapes, len(parts))
            counts = [sum(-(-math.prod(s) // len(parts)) for s in shapes.values())]
            fits = sizes == counts * len(parts)
        else:
            paddings = parts[0].paddings[index] if parts[0].paddings else ()
            places = _cut_across(shapes, sizes, paddings)
            # after the last parameter there may be padding for alignment
            counts = [sum(map(math.prod, shapes.values())) + sum(paddings)]
            fits = 0 <= sum(sizes) - counts[0] < 2 * len(parts)
        if not fits:
            msg = (
                f"{tag}: the ranks have {sizes} elements of parameter group {index}, but its"
                f" parameters ({', '.join([*shapes][:3])}, ...) need {counts[0]}: the files are"
                " from different saves."
            )
            raise CheckpointCorruptError(msg)
        rank_entries = [part.entries[index] for part in parts]
        for name, runs in places.items():
            weights[name] = _piece(shapes[name], masters, runs)
            entry = _entry(tag, rank_entries, sizes, shapes[name], runs)
            if entry:
                entries[name] = entry
    return weights, entries


def _cut_across(
    shapes: Mapping[str, tuple[int, ...]],
    sizes: Sequence[int],
    paddings: Sequence[int],
) -> dict[str, list[_Place]]:
    """Return the places of parameters at stages 1 and 2: groups split over the ranks."""
    places: dict[str, list[_Place]] = {}
    bounds, at = [*itertools.pairwise(itertools.accumulate([0, *sizes]))], 0
    for index, (name, shape) in enumerate(shapes.items()):
        end = at + math.prod(shape)
        places[name] = [
            (rank, max(at, first) - first, min(end, last) - max(at, first))
            for rank, (first, last) in enumerate(bounds)
            if max(at, first) < min(end, last)
        ]
        at = end + (paddings[index] if paddings else 0)
    return places


def _cut_each(
    shapes: Mapping[str, tuple[int, ...]], num_ranks: int
) -> dict[str, list[_Place]]:
    """Return the places of parameters at stage 3: each parameter is split over the ranks."""
    places: dict[str, list[_Place]] = {}
    at = 0
    for name, shape in shapes.items():
        count = math.prod(shape)
        size = -(-count // num_ranks)
        lengths = [max(0, min(size, count - rank * size)) for rank in range(num_ranks)]
        places[name] = [(rank, at, length) for rank, length in enumerate(lengths)]
        at += size
    return places


def _piece(
    shape: tuple[int, ...], flats: Sequence[torch.Tensor], places: Iterable[_Place]
) -> foreign.Piece:
    runs = [flats[rank].narrow(0, begin, length) for rank, begin, length in places]
    return foreign.Piece.of_runs(shape, runs)


def _entry(
    tag: Path,
    rank_entries: Sequence[Mapping[str, Any]],
    sizes: Sequence[int],
    shape: tuple[int, ...],
    places: Iterable[_Place],
) -> dict[str, Any]:
    """Return the optimizer's state of one parameter: slices of flat tensors, and numbers.

    Raises:
        CheckpointCorruptError: a rank's flat tensor is missing or too short.
    """
    entry: dict[str, Any] = {}
    for key, first in rank_entries[0].items():
        values = [e.get(key) for e in rank_entries]
        if isinstance(first, torch.Tensor) and first.ndim:
            shapes = [tuple(getattr(value, "shape", ())) for value in values]
            # longer tensors are valid: they have the padding after a group
            fits = [
                len(s) == 1 and s[0] >= n for s, n in zip(shapes, sizes, strict=True)
            ]
            if not all(fits):
                msg = (
                    f"{tag}: the optimizer's {key!r} has the shapes {shapes} on the ranks, but"
                    f" the weights have the sizes {sizes}. af.import_state cannot read the"
                    " state of such an optimizer."
                )
                raise CheckpointCorruptError(msg)
            entry[key] = _piece(shape, cast("list[torch.Tensor]", values), places)
        elif key == "step":
            entry[key] = torch.as_tensor(first, dtype=torch.float32)
        else:
            entry[key] = first
    return entry


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
"""DeepSpeed's own keys of a model file. Other keys, such as schedulers, are unexpected."""


def parts_at(folder: Path) -> Path | None:
    """Return the folder with DeepSpeed's files: this folder, or its newest tag's folder.

    Returns: None if neither this folder nor its subfolders have files of DeepSpeed.

    Raises:
        CheckpointError: there are tags, but no file `latest`, or the newest tag is missing.
    """
    if _has_parts(folder):
        return folder
    if not arguments.is_directory(folder):
        return None
    tags = sorted(path.name for path in folder.iterdir() if _has_parts(path))
    latest = folder / LATEST
    if arguments.is_file(latest):
        name = latest.read_bytes()[:1000].decode(errors="replace").strip()
        if name in tags:
            return folder / name
        msg = (
            f"{latest} names {name!r} as the newest checkpoint, but the DeepSpeed folders there"
            f" are: {', '.join(tags) or 'none'}. Import one of these, or copy all folders."
        )
        raise CheckpointCorruptError(msg)
    if tags:
        newest = str(folder / tags[-1])
        msg = (
            f"{folder} has DeepSpeed folders ({', '.join(tags)}), but no file {LATEST!r} that"
            f" names the newest. Choose a folder: af.import_state(state, {newest!r})."
        )
        raise CheckpointError(msg)
    return None


def _has_parts(folder: Path) -> bool:
    return arguments.is_directory(folder) and any(
        path.name.endswith(("_optim_states.pt", "model_states.pt"))
        for path in folder.iterdir()
    )


def found_in(folder: Path, tag: Path, *, params: Collection[str]) -> foreign.Found:
    """Find the tensors of a saved training state in a folder of DeepSpeed.

    Args:
        folder: the folder that the user passed.
        tag: the folder with DeepSpeed's files: the same folder, or a tag's folder in it.
        params: the names of the model's parameters.

    Raises:
        CheckpointError: the checkpoint is of a kind that is not supported.
        CheckpointCorruptError: a rank's file is missing, truncated, or from another save.
    """
    files = sorted(path.name for path in tag.iterdir())
    _check_kind(tag, files)
    with export.raise_corrupt(
        f"{tag} is not a valid checkpoint of DeepSpeed's ZeRO", Exception
    ):
        parts = parts_of(tag, files)
        model, weights = _model(tag, parts)
        masters, entries = put_together(tag, parts, model["param_shapes"])
        steps = int(model["global_steps"]) - int(model["skipped_steps"])
        shared = dict(model.get("shared_params") or {})
    weights |= masters
    weights |= {name: weights[src] for name, src in shared.items() if src in weights}
    rest = [str(key) for key in model if key not in _COUNTED and model[key] is not None]
    rest += ["loss_scaler"] if any(part.is_scaled for part in parts) else []
    rest += [n for n in files if not (PART_FILE.fullmatch(n) or _MODEL.fullmatch(n))]
    if tag != folder:
        siblings = {path.name for path in folder.iterdir()} - {LATEST, tag.name}
        rest += sorted(siblings - _SCRIPTS)
    return foreign.Found(
        weights=weights,
        entries={name: entry for name, entry in entries.items() if name in params},
        step=None if any("step" in entry for entry in entries.values()) else steps,
        left=tuple(rest),
    )


def _check_kind(tag: Path, files: Sequence[str]) -> None:
    """Check that the model was split only by ZeRO's data parallelism.

    Raises:
        CheckpointError: the checkpoint has, for example, pipeline or tensor parallelism.
    """
    matches = [PART_FILE.fullmatch(name) or _MODEL.fullmatch(name) for name in files]
    several = {match["mp"] for match in matches if match and int(match["mp"])}
    problem = ""
    if any(file.startswith("expp_rank_") or "_expert_" in file for file in files):
        problem = "has a mixture of experts, which is split over other ranks"
    elif any(file.startswith("layer_") for file in files):
        problem = "was saved by pipeline parallelism, with a file for each layer"
    elif several:
        other = min(several)
        problem = f"has a model that was split over ranks (it has mp_rank_{other})"
    elif "offloaded_tensors" in files:
        problem = "has an optimizer whose tensors were on NVMe, in other files"
    elif "zero" in files and not any(PART_FILE.fullmatch(file) for file in files):
        problem = "is a universal checkpoint; import the folder it was made from"
    if problem:
        msg = (
            f"{tag} {problem}. af.import_state reads only plain models, saved at ZeRO stages 1, 2"
            " and 3. Convert the weights to one state dict with DeepSpeed's own tools, and load"
            " them with af.import_torch_weights."
        )
        raise CheckpointError(msg)


def _model(
    tag: Path, parts: Sequence[Part]
) -> tuple[Mapping[str, Any], dict[str, foreign.Saved]]:
    """Return the contents of the model file, and its buffers and frozen parameters."""
    cuts_each = parts[0].cuts_each
    pattern = "zero_pp_rank_{}_mp_rank_00_model_states.pt"
    names = [pattern.format(rank) for rank in range(len(parts))]
    names = names if cuts_each else ["mp_rank_00_model_states.pt"]
    for name in names:
        if not arguments.exists(tag / name):
            msg = f"{tag} has no {name}, the model file of a rank. {WHOLE}"
            raise CheckpointCorruptError(msg)
    model = load_file(tag / names[0])
    if model.get("param_shapes") is None:
        msg = f"{tag / names[0]} has no shapes of parameters; its keys are {sorted(model)}."
        raise CheckpointCorruptError(msg)
    module = cast("Mapping[str, torch.Tensor]", model["module"])
    full_names = model["buffer_names"] if cuts_each else module
    weights: dict[str, foreign.Saved] = {
        name: module[name].detach() for name in full_names
    }
    frozen_shapes = model.get("frozen_param_shapes") if cuts_each else {}
    shapes = shapes_of(frozen_shapes or {})
    if shapes:
        rest = [load_file(tag / name) for name in names[1:]]
        by_rank = [m["frozen_param_fragments"] for m in (model, *rest)]
        for name, shape in shapes.items():
            runs, open_ = list[torch.Tensor](), math.prod(shape)
            for fragments in by_rank:
                runs.append(fragments[name][:open_])
                open_ -= len(runs[-1])
            weights[name] = foreign.Piece.of_runs(shape, runs)
    return model, weights
