# SPDX-License-Identifier: Apache-2.0
"""Where an optimizer reads what it keeps of a parameter: its counts on the host, all else there.

torch's optimizers count the updates of each parameter in a tensor, out of which they work numbers.
On a device each would be waited for; so it is on the host, unless a kernel reads it there.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import ASGD, Optimizer

from accelfn.base.shards import is_shard
from accelfn.structure.partition import parts_of

COUNTS = frozenset({"step", "mu_product", "eta", "mu"})
"""What torch's optimizers keep of a parameter as one number, as of a lone one all else."""


def beside(
    opt_state: Mapping[str, Mapping[str, Any]],
    params: Mapping[str, torch.Tensor],
    optimizer: Optimizer,
    module: nn.Module,
) -> dict[str, dict[str, Any]]:
    """Return what an optimizer keeps of parameters where it would have made it.

    Args:
        opt_state: by name of the parameter; what is of none stays where it is, as parts do.
        params: where they are.
        optimizer: of the definition.
        module: its parameters are those of the optimizer.
    """
    names = {id(meta): name for name, meta in module.named_parameters()}
    counted_there = {
        names[id(param)]
        for part in parts_of(optimizer)
        for group in part.param_groups
        if group.get("fused") or group.get("capturable") or isinstance(part, ASGD)
        for param in group["params"]
    }

    def put(name: str, key: str, value: Any) -> Any:
        if name not in params or not isinstance(value, torch.Tensor) or is_shard(value):
            return value
        is_count = key in COUNTS and not value.dim()
        on_host = is_count and name not in counted_there
        return value.to("cpu" if on_host else params[name].device)

    return {
        name: {key: put(name, key, value) for key, value in entry.items()}
        for name, entry in opt_state.items()
    }
