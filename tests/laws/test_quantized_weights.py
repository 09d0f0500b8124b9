# SPDX-License-Identifier: Apache-2.0
"""Frozen weights with 4 and 8 bits, as of bitsandbytes, in checkpoints and on several ranks."""

import tempfile
from functools import partial

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

import accelfn as af
from accelfn.testing import simulate

bnb = pytest.importorskip("bitsandbytes", reason="bitsandbytes is optional")

FOUR = partial(bnb.nn.Linear4bit, compute_dtype=torch.float32)
KINDS = {
    "nf4": partial(FOUR, quant_type="nf4"),
    "nf4 in float32": partial(FOUR, quant_type="nf4", quant_storage=torch.float32),
    "int8": partial(bnb.nn.Linear8bitLt, has_fp16_weights=False),
}


def is_base(name, _):
    return name == "base"


SETUPS = {
    "one": af.chain(),
    "ddp": af.chain(af.shard_data(), af.wrap_ddp()),
    "fsdp": af.chain(af.shard_data(), af.wrap_fsdp(units=is_base)),
}
setups = st.sampled_from(list(SETUPS))


class Adapted(nn.Module):
    def __init__(self, kind, *, is_used):
        super().__init__()
        base = KINDS[kind](64, 64, bias=False).requires_grad_(False)  # noqa: FBT003
        self.base = base.to("cpu")  # quantizes
        self.down, self.up = nn.Linear(64, 4), nn.Linear(4, 64)
        if is_used:  # then 8-bit layers keep their scales in another place
            self.base(torch.ones(1, 64))

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def run(setup, source, seed, body):
    def program(world):
        data = torch.linspace(-1, 1, 512).view(8, 64)
        state = af.TrainState.create(
            model=source,
            optimizer=partial(torch.optim.SGD, lr=0.1),
            data=af.Data(data, global_batch_size=4),
            setup=SETUPS[setup],
            world=world,
            seed=seed,
        )
        state = body(state)
        return af.snapshot_model(state)(data).detach(), dict(state.buffers)

    return simulate(1 if setup == "one" else 2, program)[0]


@given(st.sampled_from(list(KINDS)), setups, setups, st.booleans())
@example(kind="int8", saved="ddp", loaded="one", is_used=False)
@example(kind="int8", saved="one", loaded="ddp", is_used=True)
def test_a_checkpoint_has_the_scales_of_its_weights(kind, saved, loaded, is_used):
    """A state of another model computes after loading what the saved state does, bitwise."""
    step = af.make_step(lambda model, x: model(x).square().mean())
    with tempfile.TemporaryDirectory() as folder:

        def train(state):
            state, _ = step(state, next(iter(af.batches(state))))
            af.save(state, f"{folder}/saved")
            return state

        load = partial(af.load, directory=f"{folder}/saved")
        model = partial(Adapted, kind, is_used=is_used)
        if kind == "int8" and "fsdp" in (saved, loaded):
            with pytest.raises(af.errors.ModelError, match=r"'base.weight' has 8 bits"):
                run("fsdp", model, 0, load)
            return
        expected = run(saved, model, 0, train)
        actual = run(loaded, model, 1, load)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
