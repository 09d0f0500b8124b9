# SPDX-License-Identifier: Apache-2.0
"""What ZeRO saved in parts, of any sizes and over any ranks, is all there."""

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import accelfn as af
from accelfn.testing import simulate
from tests.laws.test_import_state import whole
from tests.zero_folders import Training, write_zero

OPTIMIZERS = {
    "adamw": (torch.optim.AdamW, ("exp_avg", "exp_avg_sq")),
    "momentum": (partial(torch.optim.SGD, momentum=0.5), ("momentum_buffer",)),
}
shapes = st.lists(st.integers(1, 5), min_size=0, max_size=3).map(tuple)


class Net(nn.Module):
    """Parameters of any shapes, of which one is tied and others are frozen."""

    def __init__(self, groups: Any, frozen: Any) -> None:
        super().__init__()
        for index, group in enumerate(groups):
            for place, shape in enumerate(group):
                param = nn.Parameter(torch.zeros(shape))
                self.register_parameter(f"trained_{index}_{place}", param)
        for place, shape in enumerate(frozen):
            param = nn.Parameter(torch.zeros(shape), requires_grad=False)
            self.register_parameter(f"frozen_{place}", param)
        self.tied = self.trained_0_0
        self.register_buffer("seen", torch.zeros(2))


def filled(tensors: Any, begin: float) -> dict[str, torch.Tensor]:
    """Return other numbers for each of the elements, which 16 bits do not hold."""
    found = {}
    for name, tensor in tensors:
        count = tensor.numel()
        found[name] = (torch.arange(float(count)) + begin).view(tensor.shape) / 3
        begin += count
    return found


def optimizer_of(kind: str) -> Any:
    """Return what makes an optimizer of one group: they need not be those that saved."""
    make, _ = OPTIMIZERS[kind]
    return lambda named: make([p for _, p in named if p.requires_grad], lr=0.1)


@given(
    groups=st.lists(st.lists(shapes, min_size=1, max_size=4), min_size=1, max_size=3),
    frozen=st.lists(shapes, max_size=2),
    kind=st.sampled_from(sorted(OPTIMIZERS)),
    stage=st.integers(1, 3),
    ranks=st.integers(1, 4),
    align=st.sampled_from([1, 4]),
    read_by=st.integers(0, 3),
)
def test_what_zero_saved_is_all_there(
    groups, frozen, kind, stage, ranks, align, read_by
):
    """Weights, buffers and what an optimizer keeps, bitwise, in one process and in parts."""
    make = partial(Net, groups, frozen)
    model = make()
    params = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    still = [(n, p) for n, p in model.named_parameters() if not p.requires_grad]
    weights = filled(params, 1.0)
    kept = {key: filled(params, at) for at, key in enumerate(OPTIMIZERS[kind][1], 1000)}
    training = Training(
        groups=[
            {n: w for n, w in weights.items() if n.startswith(f"trained_{index}_")}
            for index in range(len(groups))
        ],
        kept=kept,
        frozen=filled(still, 0.5),
        buffers={"seen": torch.tensor([3.0, 5.0])},
        shared={"tied": "trained_0_0"},
        counts=kind == "adamw",
        steps=7,
    )

    def read(world: af.World, folder: Path) -> None:
        setup = af.chain(af.wrap_fsdp()) if read_by else af.chain()
        state = af.TrainState.create(
            model=make, optimizer=optimizer_of(kind), setup=setup, world=world
        )
        report = af.import_state(state, folder)
        found = report.state
        assert (report.missing, report.unexpected, report.cast) == ((), (), {})
        assert found.step == 7
        assert all(each.grad_fn is None for each in found.params.values())
        there = {**whole(found.params), **found.buffers}
        asked = {**weights, **training.frozen, **training.buffers}
        assert there.keys() == asked.keys()
        for name, each in asked.items():
            assert torch.equal(there[name], each), name
        for key, entries in kept.items():
            for name, each in entries.items():
                entry = whole(found.opt_state[name])
                assert torch.equal(entry[key], each), (key, name)
                assert "step" not in entry or float(entry["step"]) == 7

    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "saved"
        write_zero(folder, training, stage=stage, ranks=ranks, align=align)
        simulate(max(read_by, 1), partial(read, folder=folder))
