# SPDX-License-Identifier: Apache-2.0
"""Says where a rank stands along the axes that its launcher has named."""

import torch

import accelfn as af

torch.set_num_threads(1)
with af.World.from_env(timeout=20, device="cpu") as world:
    part = world.along("dp_shard")
    total = af.all_reduce(torch.tensor(part.rank + 1.0), part, "sum").item()
    place = f"rank {part.rank} of {part.size} along {', '.join(world.axes)}"
    print(f"{place}, whose ranks sum to {total}", flush=True)  # noqa: T201
