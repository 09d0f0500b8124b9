# SPDX-License-Identifier: Apache-2.0
"""What an optimizer keeps of a parameter, tried on one element."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from accelfn.checkpoint.save import optimizer_name
from accelfn.errors import CheckpointError
from accelfn.state.state import TrainState
from accelfn.structure.prototype import rebuilt


def check_kept(
    state: TrainState, kept: Mapping[str, Mapping[str, Any]], folder: Path
) -> None:
    """Refuse what another optimizer keeps, where the state's can be tried.

    Raises:
        CheckpointError: it keeps other entries; or parameters are none of the model's.
    """
    unknown = sorted(kept.keys() - state.params.keys())
    if unknown:
        msg = f"{folder}: an optimizer's {unknown[:5]} are no parameters of the model."
        raise CheckpointError(msg)
    keeps = _keeps(state)
    for name, entry in kept.items():
        own = keeps.get(name)
        if own is not None and own != entry.keys():
            msg = (
                f"{folder} has {sorted(entry)} of {name!r}, and {optimizer_name(state)}, the"
                f" state's optimizer, keeps {sorted(own)}: it is another optimizer's, or its"
                " options differ. strict=False does not help; load the weights alone, with"
                " af.import_model."
            )
            raise CheckpointError(msg)


def _keeps(state: TrainState) -> dict[str, set[str]]:
    """Return what the state's optimizer keeps, by parameter; nothing if it cannot be tried."""
    metas = dict(state.definition.skeleton.module.named_parameters())
    tiny = {
        name: nn.Parameter(torch.zeros((1,) * meta.ndim, dtype=meta.dtype))
        for name, meta in metas.items()
    }
    memo = {id(meta): tiny[name] for name, meta in metas.items()}
    try:
        optimizer = rebuilt(state.definition.optimizer, memo)
        for param in tiny.values():
            param.grad = torch.zeros_like(param)
        optimizer.step()
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001 - one that wants more than parameters and gradients
        return {}
    held = cast("dict[Any, dict[str, Any]]", optimizer.state)
    return {n: set(held[p]) for n, p in tiny.items() if p in held}
