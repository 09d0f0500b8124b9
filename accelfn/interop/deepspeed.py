# SPDX-License-Identifier: Apache-2.0
"""Read checkpoints of DeepSpeed's ZeRO without DeepSpeed.

A file of the model gives the order and the shapes of the parameters in ZeRO's flat groups.
"""

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, cast

import attrs
import torch

from accelfn.errors import CheckpointCorruptError, CheckpointError
from accelfn.interop import torch_files
from accelfn.plug import arguments, foreign

# The optimizer files of ZeRO: each rank wrote a part of every flat group.
#
# DeepSpeed is not needed: inert placeholders replace the few DeepSpeed classes in the files.


PART_FILE = re.compile(
    r"(?:\w+_)?zero_pp_rank_(?P<rank>\d+)_mp_rank_(?P<mp>\d+)_optim_states\.pt"
)
_SHUT = (
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
)
"""Classes of objects that are not needed, such as loss scalers and redundant records."""
_ADVICE = (
    "Save with a client_state and schedulers of plain data; or write the weights alone, with the"
    " zero_to_fp32.py beside it, for af.import_torch_weights, if you trust who wrote it."
)
WHOLE = "Copy the folder as a whole, with the files of all machines."


@attrs.frozen(eq=False)
class Part:
    """A rank's part of an optimizer.

    Attributes:
        file: the rank's file.
        cuts_each: whether every parameter is cut, as in stage 3.
        counts: the number of parts of each group.
        masters: the rank's weights, a flat tensor per group.
        entries: the optimizer's entries for each of the flat tensors.
        paddings: elements of padding after each parameter of a group; () without padding.
        is_scaled: whether the training used a dynamic loss scale, which is not read.
    """

    file: Path
    cuts_each: bool
    counts: frozenset[int]
    masters: tuple[torch.Tensor, ...]
    entries: tuple[Mapping[str, Any], ...]
    paddings: tuple[tuple[int, ...], ...]
    is_scaled: bool


def parts_of(tag: Path, files: Iterable[str]) -> list[Part]:
    """Read the parts of all ranks, in the order of ranks.

    Raises:
        CheckpointError: the folder has no parts.
        CheckpointCorruptError: a part is missing, or there is an extra part.
    """
    by_rank = {int(m["rank"]): m[0] for m in map(PART_FILE.fullmatch, files) if m}
    if not by_rank:
        msg = (
            f"{tag} has no *_optim_states.pt: it was saved at stage 0, or is cut off. Of ZeRO"
            " stages 1, 2 and 3 are read; " + WHOLE
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
                f"{part.file} is one of {count} parts, and those of ranks {ranks} are there:"
                f" {name} is missing. {WHOLE}"
            )
            raise CheckpointCorruptError(msg)
        if part.counts != {len(parts)} or part.cuts_each != parts[0].cuts_each:
            counts = sorted(part.counts)
            msg = (
                f"{part.file} is one of {counts[0] if len(counts) == 1 else counts} parts, and"
                f" {tag} has {len(parts)}: some are another save's, of another number of"
                " ranks. Remove these, or take a folder that was written once."
            )
            raise CheckpointCorruptError(msg)
    return parts


def _part(file: Path) -> Part:
    part = torch_files.load_plain(file, _ADVICE, shut=_SHUT)["optimizer_state_dict"]
    cuts_each = "fp32_flat_groups" in part
    key = "fp32_flat_groups" if cuts_each else "single_partition_of_fp32_groups"
    if key not in part:
        msg = f"{file} has no part of the weights: {key!r} is not among {sorted(part)}."
        raise CheckpointCorruptError(msg)
    masters = tuple(part[key])
    inner = part["optimizer_state_dict" if cuts_each else "base_optimizer_state"]
    entries = tuple(_entries_of_groups(inner))
    count = part["partition_count"]
    counts = frozenset(map(int, count if isinstance(count, list) else [count]))
    flat = all(
        isinstance(master, torch.Tensor) and master.ndim == 1 for master in masters
    )
    if not flat or len(entries) != len(masters) or not counts:
        msg = (
            f"{file} has {len(masters)} parts of weights, and {len(entries)} of what its"
            " optimizer keeps: it is not as ZeRO writes it."
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
    """Yield an optimizer's entries of each flat tensor; some optimizers count in groups."""
    if isinstance(inner, list):  # ZeRO calls it elastic
        yield from cast("list[dict[str, Any]]", inner)
        return
    for group in inner["param_groups"]:
        common = {"step": group["step"]} if "step" in group else {}
        for place in group["params"]:
            entry = inner["state"].get(place)
            yield {**common, **entry} if entry else {}


def load_file(file: Path) -> Mapping[str, Any]:
    """Read a file of DeepSpeed, with placeholders for classes that are not needed."""
    return torch_files.load_plain(file, _ADVICE, shut=_SHUT)


# Flat groups of ZeRO: assemble parameters from the parts of all ranks.
#
# Stages 1 and 2 concatenate the parameters of a group with padding, and each rank keeps an equal
# part of the result. Stage 3 cuts every parameter into one flat part per rank, and a rank
# concatenates its parts. An optimizer's entries have the layout of its weights.


_Place: TypeAlias = tuple[int, int, int]
"""A run of elements: the rank that has the run, its offset there, and its length."""


def shapes_of(shapes: Mapping[str, Iterable[int]]) -> dict[str, tuple[int, ...]]:
    """Convert a file's shapes to tuples of integers, by name."""
    return {str(name): tuple(map(int, shape)) for name, shape in shapes.items()}


def put_together(
    tag: Path, parts: Sequence[Part], groups: Sequence[Mapping[str, Iterable[int]]]
) -> tuple[dict[str, foreign.Piece], dict[str, dict[str, Any]]]:
    """Return the weights and the optimizer's entries, by parameter name.

    Raises:
        CheckpointCorruptError: the groups or their sizes do not fit the model.
    """
    weights: dict[str, foreign.Piece] = {}
    entries: dict[str, dict[str, Any]] = {}
    for part in parts:
        if len(part.masters) != len(groups):
            msg = (
                f"{part.file} has {len(part.masters)} groups, and the model's file names"
                f" {len(groups)}: they are of different saves."
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
            # the rest after the last parameter is alignment
            counts = [sum(map(math.prod, shapes.values())) + sum(paddings)]
            fits = 0 <= sum(sizes) - counts[0] < 2 * len(parts)
        if not fits:
            msg = (
                f"{tag}: ranks have {sizes} elements of group {index}, and its parameters,"
                f" {[*shapes][:3]} and so on, take {counts[0]}: they are of different saves."
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
    """Return the runs of parameters that are concatenated over all ranks."""
    places: dict[str, list[_Place]] = {}
    at = 0
    for index, (name, shape) in enumerate(shapes.items()):
        end = at + math.prod(shape)
        places[name] = []
        begin = 0
        for rank, size in enumerate(sizes):
            first, last = max(at, begin), min(end, begin + size)
            if first < last:
                places[name].append((rank, first - begin, last - first))
            begin += size
        at = end + (paddings[index] if paddings else 0)
    return places


def _cut_each(
    shapes: Mapping[str, tuple[int, ...]], num_ranks: int
) -> dict[str, list[_Place]]:
    """Return the runs of parameters that are cut into equal, padded parts per rank."""
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
    """Return an optimizer's entry of a parameter: parts of flat tensors, and numbers.

    Raises:
        CheckpointCorruptError: the entries of ranks differ in kind.
    """
    entry: dict[str, Any] = {}
    for key, first in rank_entries[0].items():
        values = [e.get(key) for e in rank_entries]
        if isinstance(first, torch.Tensor) and first.ndim:
            for value, size in zip(values, sizes, strict=True):
                # an optimizer also keeps the padding after a group
                if getattr(value, "ndim", 0) != 1 or len(cast("Any", value)) < size:
                    shapes = [tuple(getattr(value, "shape", ())) for value in values]
                    msg = (
                        f"{tag}: of {key!r} ranks have {shapes}, and of the weights {sizes}:"
                        " an optimizer that keeps such is not read."
                    )
                    raise CheckpointCorruptError(msg)
            entry[key] = _piece(shape, cast("list[torch.Tensor]", values), places)
        elif key == "step":
            step = torch.as_tensor(first, dtype=torch.float32)
            entry[key] = foreign.Piece.of(step)
        else:
            entry[key] = (
                foreign.Piece.of(first) if isinstance(first, torch.Tensor) else first
            )
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
"""Keys of a model file that DeepSpeed needs; other keys are schedulers and users' entries."""


def parts_at(folder: Path) -> Path | None:
    """Return the folder with the parts: this folder, or its newest tag; None if neither.

    Raises:
        CheckpointError: no tag is marked as the newest, or the newest is missing.
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
            f"{latest} says that {name!r} is the newest, and such folders of DeepSpeed there"
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
    return arguments.is_directory(folder) and any(
        path.name.endswith(("_optim_states.pt", "model_states.pt"))
        for path in folder.iterdir()
    )


def found_in(
    folder: Path, tag: Path, *, params: Collection[str], names: Collection[str]
) -> foreign.Found:
    """Return the tensors of a training in a folder of DeepSpeed.

    Args:
        folder: the folder that the user passed.
        tag: the folder with the parts: the same folder, or a tag in it.
        params: the names of the model's parameters.
        names: the names of parameters and buffers.

    Raises:
        CheckpointError: the format is not supported.
        CheckpointCorruptError: a rank's file is missing, truncated, or from another save.
    """
    files = sorted(path.name for path in tag.iterdir())
    _check_kind(tag, files)
    try:
        parts = parts_of(tag, files)
        model, weights = _model(tag, parts)
        masters, entries = put_together(tag, parts, model["param_shapes"])
        steps = int(model["global_steps"]) - int(model["skipped_steps"])
        shared = dict(model.get("shared_params") or {})
    except CheckpointError:
        raise
    except Exception as error:  # random bytes can raise any error
        msg = f"{tag} does not hold what DeepSpeed's ZeRO saves: {error!r}."
        raise CheckpointCorruptError(msg) from error
    weights |= masters
    weights |= {name: weights[src] for name, src in shared.items() if src in weights}
    rest = [str(key) for key in model if key not in _COUNTED and model[key] is not None]
    rest += ["loss_scaler"] if any(part.is_scaled for part in parts) else []
    rest += [n for n in files if not (PART_FILE.fullmatch(n) or _MODEL.fullmatch(n))]
    if tag != folder:
        siblings = {path.name for path in folder.iterdir()} - {LATEST, tag.name}
        rest += sorted(siblings - _SCRIPTS)
    return foreign.Found(
        weights={name: weight for name, weight in weights.items() if name in names},
        entries={name: entry for name, entry in entries.items() if name in params},
        step=None if any("step" in entry for entry in entries.values()) else steps,
        strange=tuple(name for name in weights if name not in names),
        left=tuple(rest),
    )


def _check_kind(tag: Path, files: Sequence[str]) -> None:
    """Reject models that are cut by more than data parallelism.

    Raises:
        CheckpointError: names the other kind of parallelism.
    """
    matches = [PART_FILE.fullmatch(name) or _MODEL.fullmatch(name) for name in files]
    several = {match["mp"] for match in matches if match and int(match["mp"])}
    problem = ""
    if any(file.startswith("expp_rank_") or "_expert_" in file for file in files):
        problem = "has a mixture of experts, which are cut over other ranks"
    elif any(file.startswith("layer_") for file in files):
        problem = "was saved by a pipeline, by the layers of its stages"
    elif several:
        problem = (
            f"is of a model that was split over ranks, as mp_rank_{min(several)} says"
        )
    elif "offloaded_tensors" in files:
        problem = "has an optimizer whose tensors were on NVMe, in other files"
    elif "zero" in files and not any(PART_FILE.fullmatch(file) for file in files):
        problem = "is a universal checkpoint; the folder it was made from is read"
    if problem:
        msg = (
            f"{tag} {problem}: af.import_state reads what DeepSpeed's ZeRO saves of plain models,"
            " at its stages 1, 2 and 3. Write the weights with DeepSpeed's own tools, as one"
            " state dict, for af.import_torch_weights."
        )
        raise CheckpointError(msg)


def _model(
    tag: Path, parts: Sequence[Part]
) -> tuple[Mapping[str, Any], dict[str, foreign.Piece]]:
    """Return the model file's contents, and the tensors that are in no optimizer."""
    cuts_each = parts[0].cuts_each
    pattern = "zero_pp_rank_{}_mp_rank_00_model_states.pt"
    names = [pattern.format(rank) for rank in range(len(parts))]
    names = names if cuts_each else ["mp_rank_00_model_states.pt"]
    for name in names:
        if not arguments.exists(tag / name):
            msg = f"{tag} has no {name}, which a rank wrote of the model. {WHOLE}"
            raise CheckpointCorruptError(msg)
    model = load_file(tag / names[0])
    if model.get("param_shapes") is None:
        msg = (
            f"{tag / names[0]} does not say how parameters lie; it has {sorted(model)}."
        )
        raise CheckpointCorruptError(msg)
    module = cast("Mapping[str, torch.Tensor]", model["module"])
    if not cuts_each:
        return model, {
            name: foreign.Piece.of(tensor) for name, tensor in module.items()
        }
    weights = {name: foreign.Piece.of(module[name]) for name in model["buffer_names"]}
    shapes = shapes_of(model.get("frozen_param_shapes") or {})
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
