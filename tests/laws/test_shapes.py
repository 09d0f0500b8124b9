# SPDX-License-Identifier: Apache-2.0
"""Ranks on the meta device send what ranks with values send, and hold none."""

from collections.abc import Callable
from functools import partial
from itertools import islice
from math import prod
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - as everybody calls it
from hypothesis import example, given
from hypothesis import strategies as st

import accelfn as af
from accelfn.testing import communication, simulate
from tests.internals import tree_leaves
from tests.laws.parallel_layers import LYING, SEQUENCE, UNSPLIT, Lying, Speech, speeches
from tests.laws.worlds import DDP
from tests.strategies import Run, runs

SHARD = af.shard_data()
SETUPS = {
    "ddp": DDP,
    "unused": af.chain(SHARD, af.wrap_ddp(find_unused_parameters=True)),
    "small buckets": af.chain(SHARD, af.wrap_ddp(bucket_cap_mb=0.00005)),
    "bf16": af.chain(DDP, af.compress_grads("bf16"), af.autocast("bf16")),
    "powersgd": af.chain(DDP, af.compress_grads("powersgd", start_powerSGD_iter=0)),
    "clipped": af.chain(DDP, af.clip_grad_norm(1.0), af.ema(0.5)),
    "local": af.chain(SHARD, af.local_sgd(sync_every=2)),
    "local, all": af.chain(SHARD, af.local_sgd(sync_every=1, opt_state=True)),
    "diloco": af.chain(SHARD, af.diloco(sync_every=2)),
    "8 bits": af.chain(SHARD, af.diloco(sync_every=2, bits=8)),
    "4 bits": af.chain(SHARD, af.diloco(sync_every=1, bits=4)),
    "fragments": af.chain(SHARD, af.diloco(sync_every=2, fragments=2, delay=1)),
    "fsdp": af.chain(SHARD, af.wrap_fsdp()),
    "fsdp, unused": af.chain(SHARD, af.wrap_fsdp(find_unused_parameters=True)),
    "fsdp in bf16": af.chain(
        SHARD, af.wrap_fsdp(gather_dtype=torch.bfloat16), af.autocast("bf16")
    ),
    "fsdp, clipped": af.chain(
        SHARD, af.wrap_fsdp(), af.clip_grad_norm(1.0), af.ema(0.5)
    ),
}
REFUSED = {
    "compile": (af.chain(DDP, af.compile()), "af.compile()"),
    "skip": (af.chain(DDP, af.skip_nonfinite()), "transforms/precision.py"),
    "fp16": (af.chain(DDP, af.autocast("fp16")), "transforms/precision.py"),
}


def training(run: Run, setup: object) -> Callable[[af.World], af.TrainState]:
    """Return a program that trains, and returns its state."""
    split = attrs.evolve(run, setup=setup)

    def program(world: af.World) -> af.TrainState:
        state, _ = split.train(split.state(world))
        af.all_gather_objects({"rank": world.rank}, world, label="who is who")
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
    assert not hasattr(torch, "meta")


def parts_of(
    speech: Speech, lying: Lying, device: str, *beside: object
) -> tuple[Any, int, tuple[object, ...]]:
    """Return what ranks with parts of a model send, in how many updates, and what they hold."""

    def program(world: af.World) -> object:
        state = speech.state(world, *lying.setup(speech.plan), *beside)
        step = af.make_step(loss_of_all)
        for batch in islice(af.batches(state), 2):
            state, _ = step(state, batch)
        assert device == "cpu" or values_of(state) == []
        return af.memory(state)

    size = prod(lying.axes.values())
    run = simulate(size, program, axes=lying.axes, device=device)
    return run.log, run.updates, tuple(run)


def loss_of_all(net: torch.nn.Module, batch: Any) -> af.Loss:
    """Return a loss in which each token counts alike."""
    due = batch["due"]
    total = F.cross_entropy(net(batch).transpose(1, 2), due, reduction="sum")
    return af.Loss(total, due.numel())


BY_SEQUENCE = [
    Lying({"cp": 2}, (af.wrap_ddp(),)),
    Lying({"dp_shard": 2, "cp": 2}, (af.wrap_fsdp(),)),
]


RING = Lying({"dp_shard": 2, "cp": 2}, (af.wrap_fsdp(),), ring=True)


@given(speech=speeches(), lying=st.sampled_from([*LYING, *UNSPLIT, *BY_SEQUENCE]))
@example(speech=Speech(n=4, batch_size=2, plan=SEQUENCE), lying=RING)
@example(speech=Speech(n=4, batch_size=2, plan=SEQUENCE), lying=UNSPLIT[-1])
@example(speech=Speech(n=4, batch_size=2, plan=SEQUENCE), lying=Lying({"tp": 2}))
def test_parts_of_layers_are_foreseen_from_shapes(speech: Speech, lying: Lying) -> None:
    """What ranks along any axes send is the same, and so is what each of them holds."""
    assert parts_of(speech, lying, "cpu") == parts_of(speech, lying, "meta")


@given(run=runs(n=24, updates=2, kind="plain"), size=st.sampled_from([2, 4, 64]))
def test_traffic_is_foreseen_from_shapes(run: Run, size: int) -> None:
    """Of DDP, averages and an outer optimizer: by label, before and in updates."""
    for way in ("ddp", "bf16", "local", "diloco", "fragments"):
        program = training(run, SETUPS[way])
        expected = communication(program)
        found = communication(program, device="meta")
        assert expected.bytes(size) == found.bytes(size)
        assert expected.start(size) == found.start(size)


@pytest.mark.parametrize("kind", REFUSED)
@given(run=runs(n=24, updates=1, kind="plain"))
def test_what_needs_values_is_refused_by_name(kind: str, run: Run) -> None:
    """What compiles a model, or decides by its numbers."""
    setup, named = REFUSED[kind]
    error = refusal(training(run, setup))
    assert isinstance(error, af.errors.Error)
    assert named in str(error)
    assert 'device="cpu"' in str(error)


@pytest.mark.parametrize("lying", [Lying({"tp": 2}), BY_SEQUENCE[0]])
@given(precision=st.sampled_from(["bf16", "fp16"]))
def test_what_would_be_sent_in_another_dtype_is_refused(lying, precision):
    """torch computes in the model's own dtype on meta, whatever `autocast` says."""
    cast = af.autocast(precision)
    speech = Speech(n=4, batch_size=2, plan=SEQUENCE)
    with pytest.raises(af.errors.Error, match="another dtype") as caught:
        parts_of(speech, lying, "meta", cast)
    assert repr(cast) in str(caught.value)


def number(metrics: af.Metrics, world: af.World) -> None:
    """Read a loss, and print it on one rank."""
    af.print_once(world, float(metrics["loss"]))


def decides(metrics: af.Metrics, world: af.World) -> None:
    """Stop early, on all ranks alike."""
    af.any_rank(metrics["loss"] > 3, world)


def mean_of_all(metrics: af.Metrics, world: af.World) -> None:
    """Print a line."""
    metrics.all_reduce_mean(world)


@given(reads=st.sampled_from([number, decides, mean_of_all]))
def test_a_program_that_reads_a_value_is_told_where(reads: Any) -> None:
    """The error has the line, and what is to be done."""

    def program(world: af.World) -> None:
        run = Run(setup=DDP)
        _, metrics = run.train(run.state(world))
        reads(metrics[-1], world)

    error = refusal(program)
    assert isinstance(error, af.errors.Error)
    assert "but tensors on the meta device have no values" in str(error)


@pytest.mark.parametrize("lying", [Lying({"tp": 2}), BY_SEQUENCE[0]])
@given(speech=speeches())
def test_a_loss_that_reads_a_value_is_told_where(lying: Lying, speech: Speech) -> None:
    """At a first look, too, where accelfn's own mode passes each call on to torch."""

    def reading(net: torch.nn.Module, batch: Any) -> torch.Tensor:
        return net(batch).mean() * int(batch["due"].max())

    def program(world: af.World) -> None:
        state = speech.state(world, *lying.setup(speech.plan))
        af.make_step(reading)(state, next(iter(af.batches(state))))

    with pytest.raises(af.errors.Error) as caught:
        simulate(2, program, axes=lying.axes, device="meta")
    line = reading.__code__.co_firstlineno + 1
    assert f"{Path(__file__).name}:{line} reads the value" in str(caught.value)


def mean_of_squares(net: torch.nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """Return a loss."""
    return net(rows).square().mean()


@given(
    size=st.integers(1, 4),
    drawn=st.booleans(),
    setup=st.sampled_from([af.wrap_ddp(), af.wrap_fsdp()]),
)
def test_a_model_without_values_is_taken_as_it_is(size, drawn, setup):
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
            setup=setup,
            world=world,
        )
        step = af.make_step(mean_of_squares)
        state, _ = step(state, torch.ones(3, 4, device=world.device))
        assert not (values_of(state) and world.device.type == "meta")

    log = simulate(size, partial(program, empty=False)).log
    for empty in (False, True):
        made_on_meta.clear()
        found = simulate(size, partial(program, empty=empty), device="meta").log
        assert log == found
        assert all(made_on_meta)
