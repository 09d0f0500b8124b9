# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of each format, and what they must load as, for ever.

`python -m tests.golden.make` made them: directories, and beside each a JSON file with the
bytes of all that it holds. It makes those of the newest format that are not there.
"""

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import accelfn as af
from accelfn.testing import simulate

FOLDER = Path(__file__).parent / "format-2"
CASES = {"one-rank": 1, "two-ranks": 2}
FIELDS = (
    "params",
    "buffers",
    "opt_state",
    "step",
    "cursor",
    "seed",
    "num_skipped",
    "slots",
)
X = torch.linspace(-1, 1, 36).reshape(12, 3)


class Net(nn.Module):
    """A model with tied weights, a frozen one, running statistics and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight
        self.norm, self.drop = nn.BatchNorm1d(3), nn.Dropout(0.25)
        self.frozen = nn.Parameter(torch.full((1,), 0.5), requires_grad=False)
        self.register_buffer("table", torch.arange(3), persistent=False)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """Return three numbers a sample."""
        hidden = self.drop(self.norm(self.first(batch)))
        return self.second(hidden) * self.frozen + self.table


def fresh(world: af.World) -> af.TrainState:
    """Return the state into which a checkpoint is loaded."""
    return af.TrainState.create(
        model=Net,
        optimizer=partial(torch.optim.AdamW, lr=0.01),
        schedule=af.schedules.linear(10),
        data=af.Data(X, global_batch_size=4, shuffle=True),
        setup=af.chain(
            af.ema(0.9), *([af.local_sgd(sync_every=3)] if world.size > 1 else [])
        ),
        world=world,
        seed=11,
    )


def slot() -> dict[str, Any]:
    """Return what a user might keep."""
    shared = torch.tensor([math.nan, -0.0, math.inf, 5e-324], dtype=torch.float64)
    return {
        "shared": [shared, (shared,)],
        "numbers": {"inf": math.inf, "nan": math.nan, "large": 2**70, "none": None},
        "names": {"": True, "a/b": "text é", 7: -1.5e-9, "__metadata__": [], "t": ()},
        "odd name é": torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64).conj(),
        "empty": torch.empty(0, 3, dtype=torch.int16),
        "small": {
            str(dtype): torch.tensor([0, 1, 1]).to(dtype)
            for dtype in (torch.bool, torch.uint64, torch.bfloat16, torch.float8_e4m3fn)
        },
    }


def save(folder: Path, world: af.World) -> Any:
    """Save a state that is two updates old, between two averages; return what it holds."""
    state = fresh(world).with_slot("mine", slot())
    step = af.make_step(lambda model, batch: model(batch).square().mean())
    for _, batch in zip(range(2), af.batches(state), strict=False):
        state, _ = step(state, batch)
    af.save(state, folder)
    return held(state)


def held(state: af.TrainState) -> Any:
    """Return all that is saved of a state, as plain data."""
    return {name: said(getattr(state, name)) for name in FIELDS}


def loaded(case: str, folder: Path) -> list[Any]:
    """Return all that a checkpoint holds, on each rank, as plain data."""

    def load(world: af.World) -> Any:
        return held(af.load(fresh(world), folder))

    return list(simulate(CASES[case], load).results)


def said(tree: Any) -> Any:
    """Return a tree as plain data, tensors by their bytes."""
    if isinstance(tree, torch.Tensor):
        flat = tree.detach().resolve_conj().contiguous().reshape(-1)
        raw = bytes(flat.view(torch.uint8).tolist()) if flat.numel() else b""
        return f"{tree.dtype} {tuple(tree.shape)} {raw.hex()}"
    if hasattr(tree, "items"):
        return {repr(key): said(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [type(tree).__name__, *map(said, tree)]
    return repr(tree)


def main() -> None:
    """Make those that are not there."""
    for case, size in CASES.items():
        if not (FOLDER / case).exists():
            ranks = simulate(size, partial(save, FOLDER / case)).results
            text = json.dumps(list(ranks), indent=1)
            (FOLDER / f"{case}.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
