# SPDX-License-Identifier: Apache-2.0
"""How much of a state lies in the host's memory, what a device has beside, and who is refused."""

import tempfile
from functools import partial
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import accelfn as af
from tests.accelerator import fake
from tests.accelerator.meter import metered
from tests.accelerator.test_offload import PLAIN, on_host, on_ranks


@attrs.frozen
class Deep:
    """A training of so many equal layers, of a width that dwarfs what a sample has."""

    layers: int
    width: int
    micro: int
    options: Any

    @property
    def unit(self) -> int:
        """The bytes of a layer."""
        return 4 * self.width * (self.width + 1)

    def run(self, world: af.World, folder: str) -> None:
        """Train, a sample a rank and micro-batch; save, and load."""
        layers = [partial(nn.Linear, self.width, self.width)] * self.layers

        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.blocks = nn.ModuleList(make() for make in layers)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                for block in self.blocks:
                    x = torch.tanh(block(x))
                return x

        state = af.TrainState.create(
            model=Net,
            optimizer=partial(torch.optim.AdamW, lr=0.1),
            data=af.Data(torch.ones(8, self.width), global_batch_size=2 * self.micro),
            setup=af.chain(
                af.shard_data(),
                on_host(**self.options),
                af.accumulate(num_micro_batches=self.micro),
                af.clip_grad_norm(1.0),
                af.ema(0.9),
            ),
            world=world,
        )
        step = af.make_step(lambda model, batch: model(batch).square().mean())
        for batch in af.batches(state, until_epoch=1):
            state, _ = step(state, batch)
        af.save(state, f"{folder}/saved")
        af.load(state.copy(), f"{folder}/saved")

    def peak(self) -> int:
        """Return the most bytes that a rank has of its device, from the beginning on."""
        with metered() as meter, tempfile.TemporaryDirectory() as folder:
            on_ranks({"dp_shard": 2}, partial(self.run, folder=folder))
        return max(meter.peaks.values())


@settings(max_examples=2)
@given(
    width=st.sampled_from([128, 160]),
    micro=st.sampled_from([1, 2]),
    layers=st.integers(3, 4),
    reduce_dtype=st.sampled_from([None, torch.bfloat16]),
)
def test_a_device_has_a_few_units_however_many_there_are(
    width: int, micro: int, layers: int, reduce_dtype: Any
) -> None:
    """It has eight layers at most, when training, saving and loading; more of them add what a
    sample leaves in each, and their names.
    """
    options = {"keep_grads": "sharded", "reduce_dtype": reduce_dtype}
    few, many = (Deep(n, width, micro, options) for n in (layers, 3 * layers))
    least, most = few.peak(), many.peak()
    assert least <= 8 * few.unit
    assert most - least <= 2 * layers * few.unit / 8


def test_bytes_are_told_by_where_they_are():
    """Of a state whose parts lie on the host the table has a column more."""

    def fn(world: af.World, engine: Any) -> tuple[str, int, int]:
        memory = af.memory(PLAIN.state(world, engine))
        return str(memory).splitlines()[0], memory.params.host, memory.params.here

    axes = {"dp_shard": 2}
    for head, host, here in on_ranks(axes, partial(fn, engine=on_host())):
        assert head.split() == ["here", "on", "host", "whole"]
        assert host == here - 8  # of the lone number
    for head, host, _ in on_ranks(axes, partial(fn, engine=af.wrap_fsdp())):
        assert (head.split(), host) == (["here", "whole"], 0)


def test_one_rank_on_a_device_offloads_nothing_and_is_refused():
    """By a sentence that says what to write."""
    with pytest.raises(
        af.errors.WorldError, match="has only one rank, so the parameters"
    ):
        PLAIN.state(af.World.single(device=fake.NAME), on_host())


def test_a_backend_that_knows_devices_alone_is_refused(monkeypatch):
    """When the state is made."""
    from tests.internals import SimulatedGroup

    def none(_: Any, device: torch.device) -> Any:
        msg = f"No backend type associated with device type {device}"
        raise RuntimeError(msg)

    monkeypatch.setattr(SimulatedGroup, "_get_backend", none)
    with pytest.raises(af.errors.WorldError, match='backend="cpu:gloo,fake:'):
        on_ranks({"dp_shard": 2}, lambda world: PLAIN.state(world, on_host()))
