# SPDX-License-Identifier: Apache-2.0
"""Along which axes of a world parameters are cut, and how much of them one rank has then."""

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import torch

Cuts: TypeAlias = Mapping[str, int]
"""By axis, the dim that is cut along it."""


def cuts_of(
    owners: Iterable[Any], metas: Mapping[str, torch.Tensor], axes: Mapping[str, int]
) -> dict[str, Cuts]:
    """Return what transforms say together, of those parameters that are cut at all.

    Args:
        owners: the transforms that have `layout`.
        metas: the parameters by name, as tensors without values.
        axes: how many ranks stand along each.
    """
    owners = list(owners)
    cuts = {
        name: {
            axis: dim
            for owner in owners
            for axis, dim in (owner.layout(name, meta, axes) or {}).items()
            if axes.get(axis, 1) > 1
        }
        for name, meta in metas.items()
    }
    return {name: along for name, along in cuts.items() if along}


def by_rows(meta: torch.Tensor) -> Cuts | None:
    """Return that rows are cut along dp_shard, if there are any, of any elements."""
    return {"dp_shard": 0} if meta.ndim and meta.numel() else None


def largest_part(
    shape: Iterable[int], cuts: Cuts, axes: Mapping[str, int]
) -> torch.Size:
    """Return the shape of the first rank's part, which none is larger than."""
    lengths = list(shape)
    for axis, dim in cuts.items():
        lengths[dim] = -(-lengths[dim] // axes[axis])
    return torch.Size(lengths)
