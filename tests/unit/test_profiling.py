# SPDX-License-Identifier: Apache-2.0
"""A profile shows the steps that it was asked for, and leaves nothing behind."""

import json
from collections import Counter
from contextlib import nullcontext
from functools import partial

import pytest
import torch

import accelfn as af
from accelfn.testing import simulate
from tests.states import linear_state

ALONE = af.World.single()


def profiled(directory, *, steps=6, world=ALONE, **options):
    """Train some updates under a profile; return its record and the final parameters."""
    state = linear_state(3, optimizer=partial(torch.optim.AdamW, lr=0.1), world=world)
    step = af.make_step(lambda model, batch: model(batch).square().mean())
    with af.profile(directory, world, **options) as profiler:
        for _ in range(steps):
            state, _ = step(state, torch.ones(4, 3))
            profiler.step()
    return profiler, dict(state.params)


def names(profiler) -> Counter[str]:
    """Return how often each name stands in the trace."""
    trace = json.loads(profiler.path.read_text())
    return Counter(event.get("name", "") for event in trace["traceEvents"])


def test_the_steps_that_were_asked_for_are_written(tmp_path):
    """After those that are passed over: each with its halves, and the optimizer's own."""
    profiler, _ = profiled(tmp_path / "new", wait=2, warmup=1, active=2)
    found = names(profiler)

    assert profiler.path == tmp_path / "new" / "rank-0.json"
    assert profiler.is_written
    assert {name for name in found if name.startswith("ProfilerStep")} == {
        "ProfilerStep#3",
        "ProfilerStep#4",
    }
    assert found["accelfn value_and_grad"] == found["accelfn apply_grads"] == 2
    assert found["Optimizer.step#AdamW.step"] == 2


def test_a_block_that_ends_early_writes_what_it_has(tmp_path):
    """Fewer steps than asked for are written when the block ends."""
    profiler, _ = profiled(tmp_path, steps=3)
    assert names(profiler)["accelfn apply_grads"] == 1


def test_nothing_written_is_said(tmp_path):
    """A block that ends before the first step that counts is an error."""
    with pytest.raises(af.errors.ArgumentError, match="ended after 1 calls of"):
        profiled(tmp_path, steps=1)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_said_before_the_steps(tmp_path):
    """Nobody waits for a trace that has nowhere to go."""
    (tmp_path / "taken").touch()
    with (
        pytest.raises(OSError, match="taken"),
        af.profile(tmp_path / "taken", af.World.single()),
    ):
        pytest.fail("the block was entered")


OPTIONS = [
    *("record_shapes", "profile_memory", "with_stack"),
    *("with_flops", "with_modules"),
]


@pytest.mark.parametrize("option", [None, *OPTIONS])
def test_what_is_recorded_beside_times(tmp_path, option):
    """Section D: each option records its own, and changes no step."""
    _, plain = profiled(tmp_path / "plain")
    options = {} if option is None else {option: True}
    profiler, params = profiled(tmp_path / "more", **options)
    assert all(torch.equal(plain[name], params[name]) for name in plain)
    events = profiler.key_averages()
    (product,) = [each for each in events if each.key == "aten::addmm"]
    trace = json.loads(profiler.path.read_text())["traceEvents"]
    arguments = {key for event in trace for key in event.get("args", {})}
    assert product.count == 3
    assert (product.flops > 0) == (option == "with_flops")
    assert ("Input Dims" in arguments) == (option in ("record_shapes", "with_flops"))
    assert ("Total Allocated" in arguments) == (option == "profile_memory")
    assert bool(product.stack) is False  # until it is asked for
    if option in ("record_shapes", "with_flops"):
        by_shape = profiler.key_averages(group_by_input_shape=True)
        assert any(each.input_shapes for each in by_shape)
    else:
        with pytest.raises(af.errors.ArgumentError, match="record_shapes=True"):
            profiler.key_averages(group_by_input_shape=True)
    if option == "with_stack":
        by_line = profiler.key_averages(group_by_stack_n=40)
        stacks = [each.stack for each in by_line if each.key == "aten::addmm"]
        assert "test_profiling.py" in str(stacks)
    else:
        with pytest.raises(af.errors.ArgumentError, match="with_stack=True"):
            profiler.key_averages(group_by_stack_n=1)


def test_key_averages_are_of_the_steps_written(tmp_path):
    """Section D: they are there once the steps are over, by shape where shapes are."""
    with af.profile(
        tmp_path, af.World.single(), wait=0, record_shapes=True
    ) as profiler:
        with pytest.raises(af.errors.ArgumentError, match="no step is recorded yet"):
            profiler.key_averages()
        for step in range(6):
            torch.ones(step + 1).add(1)
            profiler.step()
        inside = profiler.key_averages()
    assert "aten::add" in inside.table()
    by_shape = profiler.key_averages(group_by_input_shape=True)
    (whole,) = [each for each in profiler.key_averages() if each.key == "aten::add"]
    parts = [each for each in by_shape if each.key == "aten::add"]
    assert [each.count for each in parts] == [1, 1, 1]
    assert whole.count == 3


CPU = torch.profiler.ProfilerActivity.CPU


def test_what_is_looked_at_can_be_chosen(tmp_path):
    """The host alone gives what is recorded by default here; others are refused by name."""
    profiler, _ = profiled(tmp_path, activities=(CPU,))
    assert names(profiler)["accelfn forward"] == 3
    for wrong in ([], "cpu", 3, [CPU, "cuda"], [torch.profiler.ProfilerActivity.HPU]):
        with pytest.raises(
            af.errors.ArgumentError, match=r"activities=.*ProfilerActivity\.CPU"
        ):
            profiled(tmp_path, activities=wrong)


def test_gradients_that_cross_ranks_have_a_line(tmp_path):
    """`sync_grads` leaves a span, in a rank's own file; one rank has nothing to reduce."""

    def train(world):
        state = linear_state(3, world=world)
        compute = af.value_and_grad(lambda model, batch: model(batch).square().mean())
        is_last = world.rank == world.size - 1
        profile = af.profile(tmp_path, world) if is_last else nullcontext()
        with profile as profiler:
            for _ in range(6):
                _, grads = compute(state, torch.ones(4, 3))
                state = af.apply_grads(state, af.sync_grads(state, grads))
                if profiler is not None:
                    profiler.step()
        if profiler is None:
            return None
        return any(each.key == "accelfn reduce" for each in profiler.key_averages())

    assert simulate(1, train)[0] is False
    assert simulate(2, train)[1] is True
    assert {each.name for each in tmp_path.iterdir()} == {"rank-0.json", "rank-1.json"}


def test_a_second_profiler_is_refused(tmp_path):
    """torch has one a process, until its block ends or raises; one simulated rank has it."""
    with (
        pytest.raises(ValueError, match="mine"),
        af.profile(tmp_path, af.World.single()),
    ):
        raise ValueError("mine")
    with af.profile(tmp_path, af.World.single(), active=1, wait=0) as outer:
        with pytest.raises(af.errors.WorldError, match="one profiler in a process"):
            profiled(tmp_path)
        for _ in range(2):
            outer.step()
    with (
        torch.profiler.profile(),
        pytest.raises(af.errors.WorldError, match="is already running"),
    ):
        profiled(tmp_path)

    def train(world):
        with af.profile(tmp_path, world):
            af.barrier(world)

    with pytest.raises(af.errors.WorldError, match="profile only one rank"):
        simulate(2, train)


@pytest.mark.parametrize(
    "options",
    [
        *({"wait": -1}, {"warmup": 0}, {"active": 0}, {"active": True}),
        *({"record_shapes": 1}, {"profile_memory": None}),
        *({"with_flops": "yes"}, {"with_stack": 2}, {"with_modules": "no"}),
    ],
)
def test_options_are_checked(tmp_path, options):
    """A number of steps that can have no meaning, or no truth, is refused by name."""
    with pytest.raises(af.errors.ArgumentError, match=next(iter(options))):
        profiled(tmp_path, **options)
