# SPDX-License-Identifier: Apache-2.0
"""What Megatron-core's layers refuse, and what they leave behind."""

import importlib.util
import re
import subprocess
import sys
from functools import partial
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import accelfn as af
from accelfn.errors import ArgumentError, LossError, ModelError
from accelfn.testing import simulate

WIDTH = 8


class Net(nn.Module):
    """A column layer, and a row layer behind it."""

    def __init__(self, layers: af.megatron.Layers, **options: Any) -> None:
        super().__init__()
        self.words = layers.vocabulary(12, WIDTH)
        self.up = layers.column(WIDTH, 2 * WIDTH, **options)
        self.down = layers.row(2 * WIDTH, WIDTH)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(self.words(words))[0]))[0]


class Open(Net):
    """Goes on with what a column layer makes."""

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.up(self.words(words))[0]


class Heads(Net):
    """Counts heads for itself."""

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        by_head = self.up(self.words(words))[0].unflatten(-1, (4, -1))
        return self.down(by_head.cumsum(-1).flatten(-2))[0]


class Tailed(Net):
    """Has the row layer in a module that stands behind the column layer."""

    def __init__(self, layers: af.megatron.Layers) -> None:
        super().__init__(layers)
        self.tail = nn.Sequential(nn.LayerNorm(2 * WIDTH), self.down)


class Foreign(nn.Module):
    """Says of its layer what Megatron's say."""

    def __init__(self, _: object) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        vars(self.up.weight).update(tensor_model_parallel=True, partition_dim=0)


class Grouped(nn.Module):
    """Has one of Megatron's own, of a group of ranks."""

    def __init__(self, layers: af.megatron.Layers, world: af.World) -> None:
        super().__init__()
        # only now, for Megatron warns of what it misses when it is imported
        from megatron.core.tensor_parallel import ColumnParallelLinear

        made = {"config": layers.config, "init_method": nn.init.normal_, "bias": False}
        group = world.along("tp").group
        self.up = ColumnParallelLinear(WIDTH, WIDTH, **made, tp_group=group)


def loss(net: nn.Module, words: torch.Tensor) -> torch.Tensor:
    return net(words).square().mean()


def single() -> af.World:
    return af.World.single(device="cpu")


def state_of(
    world: af.World, model: Any = Net, plan: Any = None, layers: Any = None, **more: Any
) -> af.TrainState:
    layers = layers or af.megatron.layers(world)
    made = (layers, world) if model is Grouped else (layers,)
    return af.TrainState.create(
        model=partial(model, *made),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        setup=af.tensor_parallel(plan or {}, **more),
        world=world,
    )


def step_once(world: af.World, model: Any) -> Any:
    return af.make_step(loss)(state_of(world, model), torch.tensor([[0, 4], [9, 11]]))


def on_ranks(size: int, fn: Any, *args: Any, **options: Any) -> Any:
    return simulate(size, lambda w: fn(w, *args, **options), axes={"tp": size})


CANNOT = {
    "sequence": (Net, {}, "'words' is a Megatron layer, and accelfn does"),
    "named": (
        *(Net, {"up": "column"}),
        "the plan says 'column' for 'up', but this is a layer of af.mega",
    ),
    "shared": (Net, {"down": "replicated"}, "Remove it from the plan"),
    "inside": (Tailed, {"tail": "replicated"}, "but 'tail.1' is split. Instead"),
    "foreign": (
        *(Foreign, {}),
        "'up' is a torch.nn.modules.linear.Linear that already has",
    ),
    "grouped": (
        *(Grouped, {}),
        "Grouped cannot be copied because of its attribute 'up.tp_group'",
    ),
    "of another world": (Net, {}, 'made for 1 ranks along "tp", but the state'),
}


@pytest.mark.parametrize("case", CANNOT)
def test_what_cannot_be_split_is_refused(case):
    """When the state is made; layers of another world would be told of other ranks."""
    model, plan, said = CANNOT[case]
    more: Any = {"sequence": True} if case == "sequence" else {}
    if case == "of another world":
        more["layers"] = af.megatron.layers(single())
    with pytest.raises(ModelError, match=re.escape(said)):
        on_ranks(2, state_of, model, plan, **more)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda layers: layers.vocabulary(8, 6), "'0' has 8 rows, which do not"),
        (lambda layers: layers.column(6, 8), "'0' has 8 output features"),
        (lambda layers: layers.row(8, 6), "'0' has 8 input features"),
        # an empty plan splits nothing that does not split itself
        (lambda _: nn.Linear(2, 2), "the plan is empty, and Sequential has no layer"),
    ],
    ids=["vocabulary", "column", "row", "none"],
)
def test_features_that_do_not_divide_are_refused(make, said):
    with pytest.raises(ModelError, match=said):
        on_ranks(3, state_of, lambda layers: nn.Sequential(make(layers)))


def test_parameters_have_the_dtype_that_was_asked_for():
    layers = af.megatron.layers(single(), dtype=torch.float64)
    made = layers.column(2, 2), layers.row(2, 2), layers.vocabulary(2, 2)
    assert {p.dtype for each in made for p in each.parameters()} == {torch.float64}


def test_biases_of_some_beside_features_of_all_are_refused():
    layers = af.megatron.layers(single())
    with pytest.raises(ArgumentError, match="Leave out one of the two"):
        layers.column(2, 2, gather_output=True, skip_bias_add=True)


def test_without_the_package_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ArgumentError, match=re.escape("'accelfn[megatron]'")):
        af.megatron.layers(single())


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (Open, 'no "row" layer follows the "column" layer \'up\''),
        (Heads, "the input of 'down' is not this rank's"),
    ],
)
def test_a_model_that_is_another_in_parts_is_refused(model, said):
    """At the first step, as with torch's layers."""
    with pytest.raises(LossError, match=re.escape(said)):
        on_ranks(2, step_once, model)


def test_an_export_has_parameters_and_nothing_of_megatron_s(tmp_path):
    """Its layers have an "extra state" beside them, which nobody else reads."""

    def fn(world: af.World) -> None:
        state, _ = step_once(world, Net)
        af.export_model(state, tmp_path / "exported")

    on_ranks(2, fn)
    plain = ["down.bias", "down.weight", "up.bias", "up.weight", "words.weight"]
    assert sorted(load_file(tmp_path / "exported" / "model.safetensors")) == plain


@pytest.mark.slow
def test_importing_says_nothing_and_sets_nothing_up():
    """Megatron warns of what else it could have used, to everybody."""
    code = (
        "import warnings; warnings.simplefilter('error')\n"
        "import accelfn as af\n"
        "af.megatron.layers(af.World.single(device='cpu')).column(2, 2)\n"
        "from megatron.core import parallel_state\n"
        "assert not parallel_state.is_initialized()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    # torch's build for CUDA says so where it finds CUDA's tools and no GPU
    said = [line for line in done.stderr.splitlines() if "cpp_extension" not in line]
    assert (done.returncode, said) == (0, [])
