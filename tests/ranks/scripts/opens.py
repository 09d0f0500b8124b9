# SPDX-License-Identifier: Apache-2.0
"""Opens one world after another; says where a rank stands, and the sum of ranks from 1, in each."""

import torch

import accelfn as af

torch.set_num_threads(1)
for number in range(3):
    with af.World.from_env(timeout=20, device="cpu") as world:
        total = af.all_reduce(torch.tensor(world.rank + 1.0), world, "sum").item()
        place = f"rank {world.rank} of {world.size} along {', '.join(world.axes)}"
        print(f"{number}: {place}, sum {total}", flush=True)  # noqa: T201
