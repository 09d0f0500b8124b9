# SPDX-License-Identifier: Apache-2.0
"""Ranks on the meta device send what ranks with values send, and hold none."""

from collections.abc import Callable
from functools import partial
from typing import Any

import attrs
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import accelfn as af
from accelfn.base.tree import tree_leaves
from accelfn.testing import communication, simulate
from tests.laws.worlds import DDP
from tests.strategies import Run, runs

SHARD = af.shard_data()
SETUPS = {
    "ddp": DDP,
    "unused": af.chain(SHARD, af.wrap_ddp(find_unused_parameters=True)),
    "small buckets": af.chain(SHARD, af.wrap_ddp(bucket_cap_mb=0.00005)),
    "bf16": af.chain(DDP, af.compress("bf16"), af.autocast("bf16")),
    "powersgd": af.chain(DDP, af.compress("powersgd", start_powerSGD_iter=0)),
    "clipped": af.chain(DDP, af.clip_grad_norm(1.0), af.ema(0.5)),
    "local": af.chain(SHARD, af.local_sgd(sync_every=2)),
    "local, all": af.chain(SHARD, af.local_sgd(sync_every=1, opt_state=True)),
    "diloco": af.chain(SHARD, af.diloco(sync_every=2)),
    "8 bits": af.chain(SHARD, af.diloco(sync_every=2, bits=8)),
    "4 bits": af.chain(SHARD, af.diloco(sync_every=1, bits=4)),
    "fragments": af.chain(SHARD, af.diloco(sync_every=2, fragments=2, delay=1)),
}
REFUSED = {
    "af.wrap_fsdp()": af.wrap_fsdp(),
    "af.wrap_deepspeed(1)": af.wrap_deepspeed(1),
    "af.compile()": af.chain(DDP, af.compile()),
    "transforms/skip.py": af.chain(DDP, af.skip_nonfinite()),
    "transforms/precision.py": af.chain(DDP, af.autocast("fp16")),
}


def training(run: Run, setup: object) -> Callable[[af.World], af.TrainState]:
    """Return a program that trains, and returns its state."""
    split = attrs.evolve(run, setup=setup)

    def program(world: af.World) -> af.TrainState:
        state, _ = split.train(split.state(world))
        af.gather_objects({"rank": world.rank}, world, label="who is who")
        return af.finalize(state)

    return program


def values_of(state: af.TrainState) -> list[torch.Tensor]:
    """Return the tensors of a state that are no lone numbers, and have values."""
    parts = [
        dict(getattr(state, n)) for n in ("params", "buffers", "opt_state", "slots")
    ]
    leaves = [leaf for leaf in tree_leaves(parts) if isinstance(leaf, torch.Tensor)]
    return [each for each in leaves if each.numel() > 1 and not each.is_meta]


def refusal(program: Callable[[af.World], object]) -> Exception | None:
    """Return what a program is refused with where ranks are on the meta device."""
    try:
        communication(program, device="meta")
    except Exception as error:  # noqa: BLE001 - the law says of what class it is
        return error
    return None


@pytest.mark.parametrize("way", SETUPS)
@given(run=runs(n=24, updates=3, optimizer="adamw"), size=st.sampled_from([1, 2, 3, 4]))
@example(run=Run(n=24, updates=3, loss="weighted", kind="tied"), size=2)
def test_shapes_alone_send_what_values_send(way: str, run: Run, size: int) -> None:
    """Each call of the log is the same, in kind, label, update, shapes and bytes."""
    program = training(run, SETUPS[way])
    expected, found = simulate(size, program), simulate(size, program, device="meta")
    assert expected.log == found.log
    assert expected.updates == found.updates
    assert [each for state in found for each in values_of(state)] == []


@given(run=runs(n=24, updates=2, kind="plain"), size=st.sampled_from([2, 4, 64]))
def test_traffic_is_foreseen_from_shapes(run: Run, size: int) -> None:
    """Of DDP, averages and an outer optimizer: by label, before and in updates."""
    for way in ("ddp", "bf16", "local", "diloco", "fragments"):
        program = training(run, SETUPS[way])
        expected = communication(program)
        found = communication(program, device="meta")
        assert expected.bytes(size) == found.bytes(size)
        assert expected.start(size) == found.start(size)


@pytest.mark.parametrize("named", REFUSED)
@given(run=runs(n=24, updates=1, kind="plain"))
def test_what_needs_values_is_refused_by_name(named: str, run: Run) -> None:
    """What splits a model, compiles it, or decides by its numbers."""
    error = refusal(training(run, REFUSED[named]))
    assert isinstance(error, af.Error)
    assert named in str(error)
    assert 'device="cpu"' in str(error)


def number(metrics: af.Metrics, world: af.World) -> None:
    """Read a loss, and print it on one rank."""
    af.print_once(world, float(metrics["loss"]))


def decides(metrics: af.Metrics, world: af.World) -> None:
    """Stop early, on all ranks alike."""
    af.any_rank(metrics["loss"] > 3, world)


@given(reads=st.sampled_from([number, decides, af.mean]))
def test_a_program_that_reads_a_value_is_told_where(reads: Any) -> None:
    """The error has the line, and what is to be done."""

    def program(world: af.World) -> None:
        run = Run(setup=DDP)
        _, metrics = run.train(run.state(world))
        reads(metrics[-1], world)

    error = refusal(program)
    assert isinstance(error, af.Error)
    assert "asks for values, and tensors on the meta device have none" in str(error)


@given(size=st.integers(1, 4), drawn=st.booleans())
def test_a_model_without_values_is_taken_as_it_is(size: int, drawn: bool) -> None:
    """An instance of empty_weights, whose buffers have values, as a factory's."""

    made_on_meta: list[bool] = []

    def net() -> torch.nn.Module:
        layers = torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1)
        made_on_meta.append(layers[0].weight.is_meta)
        return torch.nn.Sequential(*layers)

    def program(world: af.World, *, empty: bool) -> None:
        with af.empty_weights():
            made = net()
        state = af.TrainState.create(
            model=made if empty else net,
            optimizer=partial(torch.optim.SGD, lr=0.1),
            init="shard" if drawn and not empty else "whole",
            setup=af.wrap_ddp(),
            world=world,
        )
        step = af.make_step(lambda model, rows: model(rows).square().mean())
        state, _ = step(state, torch.ones(3, 4, device=world.device))
        assert not (values_of(state) and world.device.type == "meta")

    log = simulate(size, partial(program, empty=False)).log
    for empty in (False, True):
        made_on_meta.clear()
        found = simulate(size, partial(program, empty=empty), device="meta").log
        assert log == found
        assert all(made_on_meta)
