# SPDX-License-Identifier: Apache-2.0
"""A rank that has parts of a model reads these parts of what others saved, and no more."""

import tempfile
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import accelfn as af
from accelfn.testing import simulate
from tests.internals import local
from tests.laws.bytes_read import bytes_read
from tests.laws.test_import_state import save

WIDE, NARROW = 2048, 16
SLACK = 50_000
"""Bytes: headers, metadata and small tensors."""
SPLIT = af.tensor_parallel({"up": "column", "down": "row"})
LAYOUTS: dict[str, tuple[tuple[Any, ...], dict[str, int]]] = {
    "fsdp of 2": ((af.shard_data(), af.wrap_fsdp()), {"dp_shard": 2}),
    "fsdp of 3": ((af.shard_data(), af.wrap_fsdp()), {"dp_shard": 3}),
    "layers": ((SPLIT,), {"tp": 2}),
    "both": ((af.shard_data(), SPLIT, af.wrap_fsdp()), {"dp_shard": 2, "tp": 2}),
}


class Net(nn.Module):
    """Two layers, and a filter of four dims."""

    def __init__(self, narrow=NARROW, wide=WIDE, filters=(12, 64)) -> None:
        super().__init__()
        self.up = nn.Linear(narrow, wide)
        self.down = nn.Linear(wide, narrow)
        self.filter = nn.Conv2d(*filters, 7)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu()) + self.filter.weight.sum()


def write(model: nn.Module, folder: str, kind: str) -> None:
    """Write a model's state dict as one process does."""
    held = dict(model.state_dict())
    if kind == "safetensors":
        safetensors.torch.save_file(held, Path(folder) / "model.safetensors")
        return
    save({"model": held}, folder)


def imported(world, *, folder, setup) -> tuple[dict[str, torch.Tensor], int, int]:
    """Return all parameters, the bytes that this rank has of them, and those it read."""
    state = af.TrainState.create(
        model=Net, optimizer=torch.optim.SGD, setup=af.chain(*setup), world=world
    )
    af.import_state(state, folder)  # reads modules of torch, too, the first time
    before = bytes_read()
    state = af.import_state(state, folder).state
    count = bytes_read() - before
    has = sum(local(each).nbytes for each in state.params.values())
    return af.full_params(state, at="eval"), has, count


@given(
    seed=st.integers(0, 9),
    kind=st.sampled_from(["safetensors", "torch"]),
    layout=st.sampled_from(sorted(LAYOUTS)),
)
def test_a_rank_reads_what_it_has(seed: int, kind: str, layout: str) -> None:
    """Under FSDP and in layers that are split, the bytes read are those of its parts."""
    torch.manual_seed(seed)
    model, (setup, axes) = Net(), LAYOUTS[layout]
    with tempfile.TemporaryDirectory() as folder:
        write(model, folder, kind)
        run = partial(imported, folder=folder, setup=setup)
        for found, has, count in simulate(prod(axes.values()), run, axes=axes):
            assert all(torch.equal(found[n], p) for n, p in model.named_parameters())
            assert has <= count + 8 * 16 <= has + SLACK


def cut_out(tensor: torch.Tensor) -> torch.Tensor:
    return torch.cat([tensor[:1], tensor, tensor[:1]])[1:-1]


def scattered(tensor: torch.Tensor) -> torch.Tensor:
    return torch.stack([tensor, -tensor], -1)[..., 0]


def turned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.transpose(0, -1).contiguous().transpose(0, -1)


LYING = st.sampled_from([torch.clone, cut_out, scattered, turned])


@given(
    seed=st.integers(0, 9),
    lying=st.lists(LYING, min_size=6, max_size=6),
    layout=st.sampled_from([None, *sorted(LAYOUTS)]),
)
def test_however_it_lay_it_comes_as_it_was(seed, lying, layout):
    """What torch saved of tensors that were turned, cut out of others or had gaps."""
    torch.manual_seed(seed)
    small = partial(Net, 4, 6, (2, 3))
    model, (setup, axes) = small(), LAYOUTS[layout] if layout else ((), {})
    laid = zip(model.named_parameters(), lying, strict=True)
    held = {name: lie(param.detach()) for (name, param), lie in laid}

    def read(world: af.World) -> dict[str, torch.Tensor]:
        state = af.TrainState.create(
            model=small, optimizer=torch.optim.SGD, setup=af.chain(*setup), world=world
        )
        return af.full_params(af.import_state(state, folder).state, at="eval")

    with tempfile.TemporaryDirectory() as folder:
        save({"model": held}, folder)
        for found in simulate(prod(axes.values()), read, axes=axes):
            assert all(torch.equal(found[n], p) for n, p in model.named_parameters())
