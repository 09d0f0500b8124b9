# SPDX-License-Identifier: Apache-2.0
"""What DeepSpeed's own engine saved on two processes goes on here, in any layout."""

import importlib.util
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import accelfn as af
from accelfn.testing import simulate
from tests.ranks.commands import run
from tests.ranks.programs_of_deepspeed import (
    KEPT,
    KINDS,
    SAVED,
    Net,
    X,
    by_hand,
    loss_of,
    optimizer_of,
)

NO_DEEPSPEED = importlib.util.find_spec("deepspeed") is None

pytestmark = [
    pytest.mark.ranks(2),
    pytest.mark.slow(together=True),  # what DeepSpeed saved once
    pytest.mark.skipif(NO_DEEPSPEED, reason="DeepSpeed is missing"),
]
ROOT = Path(__file__).parents[2]
LAYOUTS: dict[str, tuple[int, tuple[Any, ...]]] = {
    "alone": (1, ()),
    "ddp": (2, (af.shard_data(), af.wrap_ddp())),
    "fsdp": (3, (af.shard_data(), af.wrap_fsdp())),
}


@pytest.fixture(scope="module")
def saves(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return folders that DeepSpeed saved, by the names of their kinds."""
    folder = tmp_path_factory.mktemp("deepspeed")
    told = {
        "ACCELERATE_USE_DEEPSPEED": "true",
        "DS_ACCELERATOR": "cpu",
        "LOCAL_SIZE": 2,
        "TORCH_EXTENSIONS_DIR": folder / "extensions",
        "WORLD_SIZE": 2,
    }
    module = "tests.ranks.programs_of_deepspeed"
    code, _, error = run(sys.executable, "-m", module, folder, cwd=ROOT, **told)
    assert code == 0, error[-5000:]
    return folder


def create(world: af.World, kind: str, setup: tuple[Any, ...] = ()) -> af.TrainState:
    return af.TrainState.create(
        model=Net, optimizer=optimizer_of(kind), setup=af.chain(*setup), world=world
    )


def whole(tensors: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return tensors, put together where ranks have parts of them."""
    return {
        n: (t.full_tensor() if hasattr(t, "full_tensor") else t).detach().clone()
        for n, t in tensors.items()
    }


def goes_on(
    world: af.World, folder: Path, kind: str, setup: tuple[Any, ...]
) -> tuple[Any, ...]:
    """Import, and train on; return what there was of all, and where it came to."""
    report = af.import_state(create(world, kind, setup), folder)
    state, step = report.state, af.make_step(loss_of)
    there = {
        "params": whole(state.params),
        "kept": {name: whole(each) for name, each in state.opt_state.items()},
        "buffers": whole(state.buffers),
    }
    assert state.step == SAVED
    assert report.missing == ()
    assert report.unexpected == ("mine",)
    for batch in X[SAVED:]:
        state, _ = step(state, af.split_over_ranks(batch, world))
    return there, whole(state.params), report.cast


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_what_deepspeed_saved_goes_on(saves, kind, layout):
    """All is what the engine had, bitwise, and it trains as by hand, and as the engine did."""
    held = torch.load(saves / f"{kind}.pt")
    size, setup = LAYOUTS[layout]
    program = partial(goes_on, folder=saves / kind, kind=kind, setup=setup)
    ranks = simulate(size, program)
    hand = dict(by_hand(kind).named_parameters())
    for there, after, cast in ranks:
        if kind.startswith("bf16"):
            how = "torch.bfloat16 to torch.float32"
            assert cast == {"params.frozen.weight": how, "params.frozen.bias": how}
        for field in ("params", "buffers"):
            assert there[field].keys() == held["there"][field].keys()
            for name, each in held["there"][field].items():
                assert torch.equal(there[field][name], each.float()), name
        for name, entry in held["there"]["kept"].items():
            assert there["kept"][name].keys() - {"step"} == {*KEPT[KINDS[kind][0]]}
            for key, each in entry.items():
                assert torch.equal(there["kept"][name][key], each), (name, key)
        if kind.startswith("bf16"):  # the engine computes in 16 bits, a state in 32
            continue
        for name, each in after.items():
            assert torch.allclose(each, hand[name], rtol=0, atol=1e-6), name
            engine = held["after"]["params"][name]
            assert torch.allclose(each, engine, rtol=0, atol=1e-6), name


def test_what_accelerate_saved_with_deepspeed_is_the_same(saves):
    """A folder of `save_state`, whose weights are those of DeepSpeed's own loop, bitwise."""
    world = af.World.single(device="cpu")
    report = af.import_state(create(world, "adamw-2"), saves / "accelerate")
    held = torch.load(saves / "adamw-2.pt")["there"]["params"]
    assert report.state.step == SAVED
    assert {"scheduler.bin", "random_states_0.pkl"} <= set(report.unexpected)
    assert report.missing == ()
    for name, each in report.state.params.items():
        assert torch.equal(each, held[name]), name
