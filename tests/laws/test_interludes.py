# SPDX-License-Identifier: Apache-2.0
"""Whatever is set up, and whatever is done between updates, training goes on as without it."""

import tempfile
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from schedulefree import SGDScheduleFree

import accelfn as af
from accelfn.testing import simulate, strategies
from accelfn.testing.strategies import Net, Program, Samples, losses, models, programs
from tests.laws.interludes import INTERLUDES, Scene
from tests.strategies import differences, tensors

Acts = list[list[str]]
"""What is done before each update, and after the last."""
Moment = tuple[dict[str, torch.Tensor], dict[str, float]]


@st.composite
def acts(draw: st.DrawFn) -> Acts:
    """Draw a few kinds of acts, and where they stand: often, so that they meet."""
    every = st.sampled_from(sorted(INTERLUDES))
    kinds = draw(st.lists(every, min_size=1, max_size=3, unique=True))
    some = st.lists(st.sampled_from(kinds), max_size=3)
    return draw(st.lists(some, min_size=2, max_size=4))


def grouped(named: Any) -> torch.optim.Optimizer:
    """Return an optimizer of groups that differ in their rates."""
    params = list(named)
    first, rest = params[:1], params[1:]
    groups = [{"params": first, "lr": 0.125}, *([{"params": rest}] if rest else [])]
    return torch.optim.AdamW(groups, lr=0.05, eps=1e-3)


def trained(world: af.World, program: Program, acts: Acts, folder: str) -> list[Moment]:
    """Train, with something done before each update; return what there is behind each."""
    try:
        return _trained(world, program, acts, folder)
    except RuntimeError as error:
        if isinstance(error, af.errors.Error):
            raise
        raise AssertionError(error) from error  # of torch's, about what it has left


def _trained(world, program, acts, folder) -> list[Moment]:
    state, before, moments = program.state(world), None, list[Moment]()
    step, number = af.make_step(program.loss), count()
    for update in acts:
        for act in update:
            batch = next(iter(af.batches(state)))
            place = Path(folder, str(next(number)))
            scene = Scene(program, world, state, before, batch, place)
            state = INTERLUDES[act](scene) or state
        before, batch = state, next(iter(af.batches(state)))
        state, metrics = step(state, batch)
        moments.append((tensors(state), metrics.all_reduce_mean(world)))
    held_out = attrs.evolve(program.data, global_batch_size=5, remainder="short")
    measured = af.evaluate(state, held_out, program.loss)
    moments.append((tensors(af.finalize(state)), measured))
    return moments


def compared(quiet: list[Moment], found: list[Moment]) -> None:
    """Hold a training against the same one, between whose updates nothing is done."""
    for (one, means), (two, others) in zip(quiet, found, strict=True):
        assert differences(one, two) == []
        assert repr(means) == repr(others)


def check(program: Program, size: int, acts: Acts) -> None:
    """Compare on each of some ranks."""
    with tempfile.TemporaryDirectory() as folder:

        def rank(world: af.World) -> None:
            quiet = trained(world, program, [[] for _ in acts], folder)
            compared(quiet, trained(world, program, acts, folder))

        simulate(size, rank)


APART = {
    "fsdp": (af.wrap_fsdp(torch.nn.Linear), af.skip_nonfinite()),
    "fsdp, sharded": (
        af.wrap_fsdp(keep_grads="sharded", reshard_after_forward=False),
        af.accumulate(num_micro_batches=2),
        af.ema(0.5),
    ),
    "bits": (af.wrap_ddp(), af.compress_grads("bf16")),
    "powersgd": (
        af.wrap_ddp(),
        af.compress_grads(
            "powersgd",
            matrix_approximation_rank=1,
            start_powerSGD_iter=0,
            min_compression_rate=0.5,
        ),
    ),
    "in backward": (af.wrap_ddp(), af.optimizer_in_backward(), af.ema(0.5)),
    "schedule free": (af.wrap_ddp(), af.schedule_free()),
}
AXES = {"copies": {"dp_replicate": 2, "dp_shard": 2}}
"""Those of four ranks; else there are two, without."""
SETUPS: dict[str, tuple[Any, ...]] = {
    "copies": (af.local_sgd(sync_every=2), af.wrap_fsdp()),
    "ddp": (af.wrap_ddp(),),
    "static graph": (af.wrap_ddp(static_graph=True),),
    "own buffers": (
        af.wrap_ddp(forward_sync_buffers=False, gradient_as_bucket_view=False),
        af.accumulate(num_micro_batches=2),
    ),
    "local sgd": (af.local_sgd(sync_every=2, opt_state=True), af.ema(0.5)),
    "diloco": (af.diloco(sync_every=2, delay=1, fragments=2, bits=8, mix=0.5),),
    "fp16": (af.wrap_ddp(), af.autocast("fp16", init_scale=256.0, growth_interval=2)),
    "plateau": (
        af.wrap_ddp(),
        af.reduce_lr_on_plateau(0.5, patience=0),
        af.clip_grad_norm(0.5),
    ),
    "checked": (
        af.wrap_ddp(),
        af.check_replicas(every=2),
        af.sync_batchnorm(),
        af.checkpoint_activations(),
    ),
    **APART,
}


def of(name: str) -> Program:
    """Return a training with a setup, of a model with buffers and draws, on uneven shares."""
    optimizer: Any = grouped
    if name == "schedule free":
        optimizer = partial(SGDScheduleFree, lr=0.125)
    return Program(
        Samples([[i % 3, i % 2, i] for i in range(7)], [[1, i % 2] for i in range(7)]),
        model=Net(depth=1, width=3, norm=True, dropout=True, dtype="float32"),
        optimizer=optimizer,
        setup=af.chain(af.shard_data(), *SETUPS[name]),
        batch_size=5,
        shuffle=True,
    )


@pytest.mark.slow
@pytest.mark.parametrize("setup", SETUPS)
def test_each_act_beside_each_setup(setup):
    """What is done before the first update and before the second leaves no trace in three."""
    program, quiet = of(setup), dict[int, list[Moment]]()
    with tempfile.TemporaryDirectory() as folder:

        def alone(world: af.World) -> None:
            quiet[world.rank] = trained(world, program, [[], [], []], folder)

        def rank(world: af.World, act: str) -> None:
            place = str(Path(folder, act))
            found = trained(world, program, [[act], [act], []], place)
            compared(quiet[world.rank], found)

        axes = AXES.get(setup)
        size = 2 if axes is None else 4
        simulate(size, alone, axes=axes)
        for act in INTERLUDES:
            simulate(size, partial(rank, act=act), axes=axes)


@given(
    program=programs(
        model=models(unused=False, depth=st.integers(1, 2), bias=True),
        loss=losses(squared=False),  # which does not diverge
        setup=strategies.chains(include=[af.shard_data], reduced=True),
    ),
    is_grouped=st.booleans(),
    size=st.integers(1, 3),
    acts=acts(),
)
def test_what_is_done_between_updates_leaves_no_trace(program, is_grouped, size, acts):
    """Bitwise the states, the metrics and the scores of a training that nothing disturbs."""
    if is_grouped:
        program = attrs.evolve(program, optimizer=grouped)
    check(program, size, acts)


@st.composite
def apart(draw: st.DrawFn) -> tuple[af.chain, Any]:
    """Draw a setup of a transform that no chain of the catalogue has, and its optimizer."""
    name = draw(st.sampled_from(sorted(APART)))
    sgd: Any = partial(torch.optim.SGD, lr=0.125, momentum=0.5)
    optimizer = draw(st.sampled_from([sgd, grouped]))
    if name == "schedule free":
        optimizer = partial(SGDScheduleFree, lr=0.125)
    more = []
    if name in ("fsdp", "bits", "powersgd"):
        micro = draw(st.none() | st.integers(1, 3))
        more = [
            None if micro is None else af.accumulate(num_micro_batches=micro),
            draw(st.sampled_from([None, af.clip_grad_norm(0.5), af.ema(0.5)])),
        ]
    return af.chain(af.shard_data(), *APART[name], *more), optimizer


@given(
    program=programs(
        model=models(unused=False, tied=False, dtype="float32"),
        loss=losses(squared=False),
        setup=af.chain(),
    ),
    setup=apart(),
    size=st.integers(1, 3),
    acts=acts(),
)
def test_nor_does_it_where_models_are_split_or_compressed(program, setup, size, acts):
    """The same with parts of models, few bits, and optimizers with a way of their own."""
    chain, optimizer = setup
    check(attrs.evolve(program, setup=chain, optimizer=optimizer), size, acts)
