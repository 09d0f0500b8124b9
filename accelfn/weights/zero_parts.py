# SPDX-License-Identifier: Apache-2.0
"""What each rank of a ZeRO training wrote of its optimizer: a part of every flat group.

DeepSpeed itself is not needed: the few classes of it that such files mention stay shut.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import attrs
import torch

from accelfn.errors import CheckpointCorruptError, CheckpointError
from accelfn.weights import torch_files

PART_FILE = re.compile(
    r"(?:\w+_)?zero_pp_rank_(?P<rank>\d+)_mp_rank_(?P<mp>\d+)_optim_states\.pt"
)
_SHUT = (
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
)
"""Classes of what is not read: scalers of losses, and what the files say otherwise, too."""
_ADVICE = (
    "Save with a client_state and schedulers of plain data; or write the weights alone, with the"
    " zero_to_fp32.py beside it, for af.import_torch_weights, if you trust who wrote it."
)
WHOLE = "Copy the folder as a whole, with the files of all machines."


@attrs.frozen(eq=False)
class Part:
    """What a rank saved of an optimizer.

    Attributes:
        file: in which it is.
        cuts_each: whether every parameter is cut, as in stage 3.
        counts: in how many parts each group was cut.
        masters: the rank's weights, a flat tensor a group.
        entries: what the optimizer keeps of each of these.
        paddings: how many elements are behind each parameter of a group; () where none are.
        is_scaled: whether a scale of losses, which is not read, changes.
    """

    file: Path
    cuts_each: bool
    counts: frozenset[int]
    masters: tuple[torch.Tensor, ...]
    entries: tuple[Mapping[str, Any], ...]
    paddings: tuple[tuple[int, ...], ...]
    is_scaled: bool


def parts_of(tag: Path, files: Iterable[str]) -> list[Part]:
    """Return the parts of all ranks, by rank.

    Raises:
        CheckpointError: there are none.
        CheckpointCorruptError: one is missing, or one too many.
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
            said = sorted(part.counts)
            msg = (
                f"{part.file} is one of {said[0] if len(said) == 1 else said} parts, and"
                f" {tag} has {len(parts)}: some are another save's, of another number of"
                " ranks. Remove these, or take a folder that was written once."
            )
            raise CheckpointCorruptError(msg)
    return parts


def _part(file: Path) -> Part:
    held = torch_files.loaded(file, _ADVICE, shut=_SHUT)["optimizer_state_dict"]
    cuts_each = "fp32_flat_groups" in held
    key = "fp32_flat_groups" if cuts_each else "single_partition_of_fp32_groups"
    if key not in held:
        msg = f"{file} has no part of the weights: {key!r} is not among {sorted(held)}."
        raise CheckpointCorruptError(msg)
    masters = tuple(held[key])
    inner = held["optimizer_state_dict" if cuts_each else "base_optimizer_state"]
    entries = tuple(_entries_of_groups(inner))
    count = held["partition_count"]
    counts = frozenset(map(int, count if isinstance(count, list) else [count]))
    flat = all(isinstance(each, torch.Tensor) and each.ndim == 1 for each in masters)
    if not flat or len(entries) != len(masters) or not counts:
        msg = (
            f"{file} has {len(masters)} parts of weights, and {len(entries)} of what its"
            " optimizer keeps: it is not as ZeRO writes it."
        )
        raise CheckpointCorruptError(msg)
    paddings = held.get("param_alignment_paddings") or ()
    return Part(
        file=file,
        cuts_each=cuts_each,
        counts=counts,
        masters=masters,
        entries=entries,
        paddings=tuple(tuple(map(int, each)) for each in paddings),
        is_scaled=bool(held.get("dynamic_loss_scale")),
    )


def _entries_of_groups(inner: Any) -> Iterator[Mapping[str, Any]]:
    """Yield what an optimizer keeps of each flat tensor; some count in their groups."""
    if isinstance(inner, list):  # ZeRO calls it elastic
        yield from cast("list[dict[str, Any]]", inner)
        return
    for group in inner["param_groups"]:
        counted = {"step": group["step"]} if "step" in group else {}
        for place in group["params"]:
            entry = inner["state"].get(place)
            yield {**counted, **entry} if entry else {}


def loaded(file: Path) -> Mapping[str, Any]:
    """Read a file of such a folder; classes that are not needed stay shut."""
    return torch_files.loaded(file, _ADVICE, shut=_SHUT)
