# SPDX-License-Identifier: Apache-2.0
"""Write folders like DeepSpeed's ZeRO, with given tensors and for any number of ranks.

Padding between the tensors is NaN, so that a test fails if accelfn reads it.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch

Tensors = Mapping[str, torch.Tensor]


@attrs.frozen(kw_only=True, eq=False)
class Training:
    """What an engine has.

    Attributes:
        groups: the parameters that are trained, in the order of their groups.
        kept: what the optimizer keeps of each, by key and name; `step` is beside it.
        frozen: parameters that are not trained.
        buffers: of the model.
        shared: further names of parameters, and the names they have above.
        counts: whether the optimizer counts its updates.
        steps: how many there were.
    """

    groups: Sequence[Tensors]
    kept: Mapping[str, Tensors]
    frozen: Tensors = attrs.field(factory=dict)
    buffers: Tensors = attrs.field(factory=dict)
    shared: Mapping[str, str] = attrs.field(factory=dict)
    counts: bool = True
    steps: int = 2


def write_zero(
    folder, training, *, stage, ranks, align=1, tag="global_step2", **beside
):
    """Write a checkpoint of a stage of ZeRO in a new folder; return its tag's folder.

    At stages 1 and 2, every parameter begins at a multiple of `align` elements. The files of
    the model also have what is `beside`.
    """
    inside = folder / tag
    inside.mkdir(parents=True)
    (folder / "latest").write_text(tag)
    (folder / "zero_to_fp32.py").touch()
    cut = _each_cut if stage == 3 else _cut_across
    for rank in range(ranks):
        optimizer = cut(training, rank, ranks, align) | {"zero_stage": stage}
        torch.save(
            {"optimizer_state_dict": optimizer, "ds_config": {}, "ds_version": "0"},
            inside / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt",
        )
        if stage == 3 or rank == 0:
            name = f"zero_pp_rank_{rank}_" if stage == 3 else ""
            held = _model(training, rank, ranks, stage) | beside
            torch.save(held, inside / f"{name}mp_rank_00_model_states.pt")
    return inside


def _model(training: Training, rank: int, ranks: int, stage: int) -> dict[str, Any]:
    trained = {n: t for group in training.groups for n, t in group.items()}
    whole = {**trained, **training.frozen}
    whole |= {name: whole[own] for name, own in training.shared.items()}
    module = {n: t.half() for n, t in whole.items()}  # of lower precision
    if stage == 3:
        module = {name: torch.empty(0) for name in whole}
    else:
        module |= training.frozen
    fragments = {n: _part(t, rank, ranks) for n, t in training.frozen.items()}
    return {
        "module": {**module, **training.buffers},
        "buffer_names": [*training.buffers],
        "param_shapes": [
            {name: tensor.shape for name, tensor in group.items()}
            for group in training.groups
        ],
        "frozen_param_shapes": {n: t.shape for n, t in training.frozen.items()},
        "frozen_param_fragments": fragments,
        "shared_params": dict(training.shared),
        "global_steps": training.steps + 1,
        "skipped_steps": 1,
        "ds_config": {},
        "lr_scheduler": None,
    }


def _entries(training: Training, flats: Mapping[str, Any]) -> dict[str, Any]:
    step = {"step": torch.tensor(float(training.steps))} if training.counts else {}
    return {**step, **flats}


def _cut_across(training, rank, ranks, align) -> dict[str, Any]:
    """Stages 1 and 2: parameters behind each other, cut in equal parts."""
    masters, state, paddings = [], {}, []
    for index, group in enumerate(training.groups):
        behind = [-t.numel() % align for t in group.values()]
        behind[-1] = 0
        paddings.append(behind)

        def flat(tensors: Tensors, behind: Sequence[int] = behind) -> torch.Tensor:
            return torch.cat(
                [
                    each
                    for tensor, n in zip(tensors.values(), behind, strict=True)
                    for each in (tensor.flatten(), torch.full((n,), math.nan))
                ]
            )

        own = flat(group)
        size = -(-len(own) // (2 * ranks)) * 2
        begin, end = rank * size, (rank + 1) * size
        masters.append(own[begin:end].clone().requires_grad_())
        padded = {
            key: torch.cat(
                [
                    flat({n: each[n] for n in group}),
                    torch.full((size * ranks - len(own),), math.nan),
                ]
            )
            for key, each in training.kept.items()
        }
        flats = {key: each[begin:end].clone() for key, each in padded.items()}
        state[index] = _entries(training, flats)
    return {
        "single_partition_of_fp32_groups": masters,
        "base_optimizer_state": {
            "state": state,
            "param_groups": [{"params": [each]} for each in state],
        },
        "partition_count": [ranks] * len(masters),
        "param_alignment_paddings": paddings,
    }


def _each_cut(training: Training, rank: int, ranks: int, align: int) -> dict[str, Any]:
    """Stage 3: a part of each parameter."""
    del align

    def flat(tensors: Tensors) -> torch.Tensor:
        return torch.cat([_part(each, rank, ranks) for each in tensors.values()])

    state = {
        index: _entries(
            training,
            {k: flat({n: each[n] for n in group}) for k, each in training.kept.items()},
        )
        for index, group in enumerate(training.groups)
    }
    return {
        "fp32_flat_groups": [flat(each).requires_grad_() for each in training.groups],
        "optimizer_state_dict": {
            "state": state,
            "param_groups": [{"params": [*state]}],
        },
        "partition_count": ranks,
    }


def _part(tensor: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    size = -(-tensor.numel() // ranks)
    padded = torch.full((size * ranks,), math.nan)
    padded[: tensor.numel()] = tensor.flatten()
    return padded[rank * size : (rank + 1) * size].clone()
