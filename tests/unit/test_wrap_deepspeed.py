# SPDX-License-Identifier: Apache-2.0
"""What `wrap_deepspeed` refuses, when it is made, composed or applied."""

import importlib.util
import sys
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import accelfn as af
from accelfn.testing import simulate

NO_DEEPSPEED = importlib.util.find_spec("deepspeed") is None

pytestmark = pytest.mark.skipif(NO_DEEPSPEED, reason="deepspeed is not installed")
adamw = partial(torch.optim.AdamW, lr=0.1)


def begun(*setup: Any, model: Any = None, optimizer: Any = adamw) -> af.TrainState:
    return af.TrainState.create(
        model=model or (lambda: nn.Linear(4, 4)),
        optimizer=optimizer,
        setup=af.chain(af.wrap_deepspeed(2), *setup),
    )


@pytest.mark.parametrize("stage", [0, 4, True, "2", None])
def test_a_stage_is_1_2_or_3(stage):
    with pytest.raises(af.errors.ArgumentError, match="expected 1 .shards"):
        af.wrap_deepspeed(stage)


def offload(**options: Any) -> Any:
    return {"offload_optimizer": {"device": "cpu", **options}}


ZERO = [
    ({"stage": 2}, "pass stage= instead"),
    ({"overlap_com": True}, "Did you mean 'overlap_comm'"),
    ({"zero_quantized_weights": True}, "you cannot pass"),
    ({"offload_param": {"device": "cpu"}}, "you cannot pass"),
    (offload(device="nvme"), "disk"),
    ({"offload_optimizer": "cpu"}, "'device': 'cpu'"),
    (offload(ratio=1), r"offload_optimizer\['ratio'\]"),
    (
        offload(pin_memory=3),
        r"\['offload_optimizer'\]\['pin_memory'\]: Input should be",
    ),
    (
        {"overlap_comm": "perhaps"},
        r"\[\"zero_optimization\"\]\['overlap_comm'\]: .* valid boolean.*'perhaps'",
    ),
    ({"reduce_bucket_size": -1}, "greater than 0, got"),
]


@pytest.mark.parametrize(
    ("config", "match"),
    [
        ("ds.json", "expected a dict"),
        ({"train_batch_size": 8}, r"af\.Data\(global_batch_size="),
        ({"train_micro_batch_size_per_gpu": 8}, r"af\.accumulate\(micro_batch_size="),
        ({"gradient_accumulation_steps": 8}, r"af\.accumulate\("),
        ({"gradient_clipping": 1.0}, r"af\.clip_grad_norm\("),
        ({"optimizer": {}}, r"TrainState\.create\(optimizer="),
        ({"scheduler": {}}, r"TrainState\.create\(schedule="),
        ({"fp16": {"enabled": True}}, r"af\.wrap_fsdp\(\) with"),
        ({"bf16": {"enabled": True}}, r'af\.autocast\("bf16"\)'),
        ({"checkpoint": {}}, r"af\.CheckpointStore"),
        ({"zero_optimisation": {}}, "Did you mean 'zero_optimization'"),
        ({"curriculum_learning": {}}, "you cannot pass"),
        ({"gradient_predivide_factor": 2.0}, "you cannot pass"),
        ({"zero_optimization": 2}, "expected a dict"),
        *(({"zero_optimization": zero}, match) for zero, match in ZERO),
        (
            {"communication_data_type": "int8"},
            r"\[\"communication_data_type\"\]: Invalid",
        ),
        ({"communication_data_type": 16}, r"\[\"communication_data_type\"\]: Invalid"),
        ({"wall_clock_breakdown": 1}, "expected True or False"),
        ({"comms_logger": {"enabled": "perhaps"}}, "rejects config.*valid boolean"),
    ],
)
def test_a_setting_is_one_that_deepspeed_alone_says_and_takes(config, match):
    """Another is refused when composed, with where it is said, or the nearest."""
    with pytest.raises(af.errors.ArgumentError, match=match):
        af.wrap_deepspeed(2, config=config)


@pytest.mark.parametrize("value", ["fp32", "BF16", None])
def test_what_deepspeed_takes_is_taken(value):
    config = {"communication_data_type": value, "comms_logger": {"enabled": False}}
    zero = {"reduce_bucket_size": 5e8, "overlap_comm": None}
    assert af.wrap_deepspeed(2, config={**config, "zero_optimization": zero}).stage == 2


def test_skip_nonfinite_stands_beside_it():
    """In either order; DeepSpeed finds what is not finite."""
    for both in ((af.skip_nonfinite(),), (af.clip_grad_norm(1.0), af.skip_nonfinite())):
        assert begun(*both).step == 0


def test_micro_batches_are_added_up_in_one_of_two_ways():
    with pytest.raises(af.errors.ArgumentError, match="'whole' or 'sharded'"):
        af.wrap_deepspeed(2, keep_grads="parts")


def test_settings_that_are_changed_later_change_nothing():
    """A setup is a value."""
    config = {"zero_optimization": {"overlap_comm": False}}
    wrap = af.wrap_deepspeed(1, config=config)
    config["zero_optimization"]["overlap_comm"] = True
    assert wrap.config == {"zero_optimization": {"overlap_comm": False}}
    assert hash(wrap) == hash(af.wrap_deepspeed(1))


def test_a_package_that_is_not_there_is_told_with_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(af.errors.ArgumentError, match="no-build-isolation deepspeed"):
        af.wrap_deepspeed(1)


@pytest.mark.parametrize(
    ("other", "match"),
    [
        (af.wrap_ddp(), "two engines"),
        (af.wrap_fsdp(), "two engines"),
        (af.local_sgd(sync_every=2), "keeps them on their rank"),
        (af.compress_grads("fp16"), "compresses gradients"),
        (af.compile(), "the modules as one"),
        (af.optimizer_in_backward(), "updates each parameter as"),
        (af.autocast("fp16"), "weights in float32"),
        ("fp8", "8 bits"),  # which needs a package
        (af.tensor_parallel({"0": "column"}), r"Use af\.wrap_fsdp\(\) with"),
        (af.context_parallel(), r"Use af\.wrap_fsdp\(\) with"),
    ],
)
def test_what_it_cannot_stand_beside_is_refused(other, match):
    """When composed, in either order."""
    other = af.autocast("fp8") if other == "fp8" else other
    for both in ((af.wrap_deepspeed(2), other), (other, af.wrap_deepspeed(2))):
        with pytest.raises(af.errors.CompositionError, match=match):
            af.chain(*both)


@pytest.mark.parametrize(
    ("other", "match"),
    [
        (af.clip_grad_value(0.1), "reads them"),
        (af.clip_grad_norm(1.0, norm_type=1.0), "only clips by the global 2-norm"),
        (af.clip_grad_norm(1.0, per_group=True), "only clips by the global 2-norm"),
    ],
)
def test_what_looks_at_gradients_is_refused(other, match):
    """When the state is made: DeepSpeed holds them."""
    with pytest.raises(af.errors.CompositionError, match=match):
        begun(other)


@pytest.mark.parametrize(
    ("model", "match"),
    [
        (lambda: nn.Linear(4, 4).double(), "but weight, bias are torch.float64"),
        (lambda: nn.Linear(4, 4).bfloat16(), "are torch.bfloat16"),
        (lambda: nn.ParameterList([torch.ones(2), torch.ones(0)]), "no elements"),
    ],
)
def test_parameters_are_those_of_float32(model, match):
    with pytest.raises(af.errors.ModelError, match=match):
        begun(model=model)


def two(kind: Any, named: Any) -> Any:
    (_, weight), (_, bias) = named
    return kind([{"params": [weight]}, {"params": [bias]}], lr=0.1)


@pytest.mark.parametrize(
    ("optimizer", "match"),
    [
        (partial(torch.optim.Adagrad, lr=0.1), "would replace Adagrad"),
        (partial(torch.optim.Adafactor, lr=0.1), "by its own gradient only"),
    ],
)
def test_optimizers_go_element_by_element(optimizer, match):
    with pytest.raises(af.errors.OptimizerError, match=match):
        begun(optimizer=optimizer)


class Counting(torch.optim.Optimizer):
    """Counts updates in its groups, and divides by the count."""

    def __init__(self, named: Any) -> None:
        super().__init__([p for _, p in named], {"lr": 0.1, "k": 0})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["k"] += 1
            for param in group["params"]:
                if param.grad is not None:
                    param.data.sub_(param.grad, alpha=group["lr"] / group["k"])


@pytest.mark.parametrize("stage", [2, 3])
def test_a_group_is_counted_once(stage):
    """At stage 3 DeepSpeed steps each part of a group."""
    state = af.TrainState.create(model=lambda: nn.Linear(4, 4), optimizer=Counting)
    if stage == 2:
        af.wrap_deepspeed(stage)(state)
        return
    with pytest.raises(af.errors.OptimizerError, match="Counting counts updates per"):
        af.wrap_deepspeed(stage)(state)


def test_a_group_that_trains_nothing_is_refused():
    """DeepSpeed has no flat tensor of it."""
    state = af.TrainState.create(
        model=lambda: nn.Linear(4, 4), optimizer=partial(two, torch.optim.SGD)
    )
    state = state.with_trainable(lambda name, _: name == "weight")
    with pytest.raises(af.errors.OptimizerError, match="group 1 has no trained"):
        af.wrap_deepspeed(1)(state)


def test_simulated_ranks_are_refused():
    """DeepSpeed talks through the one group of a process."""

    def fn(world: af.World) -> None:
        with pytest.raises(af.errors.WorldError, match="Start processes with"):
            af.TrainState.create(
                model=lambda: nn.Linear(4, 4),
                optimizer=adamw,
                setup=af.wrap_deepspeed(3),
                world=world,
            )

    simulate(2, fn)


def test_it_changes_nothing_in_a_world_of_one():
    """There is nothing to split over."""
    x = torch.ones(3, 4)
    found = []
    for setup in (af.wrap_deepspeed(3), af.identity()):
        state = af.TrainState.create(
            model=lambda: nn.Linear(4, 4), optimizer=adamw, setup=setup
        )
        step = af.make_step(lambda net, x: net(x).square().mean())
        state, _ = step(state, x)
        found.append(state.params["weight"])
    assert torch.equal(*found)
