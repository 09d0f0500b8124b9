# SPDX-License-Identifier: Apache-2.0
"""Training on real ranks: as on simulated ones, and mistakes are told to all."""

import os
import signal
from functools import partial
from math import prod

import attrs
import pytest
import torch

import accelfn as af
from accelfn.testing import simulate
from tests.laws.reducing import GatherAll, SumAll
from tests.laws.test_branches import HSDP, Branching
from tests.processes import RankError, run_ranks
from tests.ranks.programs import train
from tests.states import SGD
from tests.strategies import LOSSES, Run, differences, tensors

pytestmark = pytest.mark.ranks(2)

DDP = af.chain(af.shard_data(), af.wrap_ddp())


def model_by_rank(world: af.World, width: int) -> None:
    """Build a model that differs by rank in its values, or its width."""
    torch.manual_seed(world.rank)
    net = torch.nn.Linear(2, 2 + width * world.rank)
    optimizer = SGD(net.parameters())
    state = af.TrainState.create(
        model=net, optimizer=optimizer, setup=af.wrap_ddp(), world=world
    )
    af.prepare_engine(state)


UNUSED = Run(kind="unused", setup=DDP, dyadic=False)


@pytest.mark.parametrize(
    ("program", "said"),
    [
        (
            partial(model_by_rank, width=0),
            "ReplicaMismatchError.*values.*rank 0: weight.*rank 1: weight",
        ),
        (
            partial(model_by_rank, width=1),
            r"ReplicaMismatchError.*structure.*\(2, 2\).*\(3, 2\)",
        ),
        (partial(train, run=UNUSED), "UnusedParametersError.*unused.*find_unused"),
    ],
    ids=["values", "shapes", "unused parameters"],
)
def test_models_that_would_drift_are_refused(program, said):
    """Models that differ when they are built, and parameters that DDP would not reduce."""
    with pytest.raises(RankError, match=f"(?s){said}"):
        run_ranks(2, program)


def fail_in_forward(world: af.World, run: Run) -> tuple[str, dict[str, torch.Tensor]]:
    """Raise in the loss on all ranks; return the state after a good step."""
    state, armed = run.state(world), [True]
    before, batch = tensors(state), next(iter(af.batches(state)))

    def loss(net, batch):
        value = LOSSES[run.loss](net, batch)
        if armed.pop():
            raise KeyError("boom")
        return value

    step = af.make_step(loss)
    with pytest.raises(KeyError) as caught:
        step(state, batch)
    assert differences(before, tensors(state)) == []
    armed += [False] * 2
    state, _ = step(state, batch)
    return str(caught.value), tensors(state)


@pytest.mark.parametrize(
    "setup", [DDP, af.chain(DDP, af.accumulate(num_micro_batches=2))]
)
def test_a_step_that_raises_on_all_ranks_can_be_tried_again(setup):
    """The state is as it was, and the next step is the one that would have been."""
    run = Run(n=8, batch_size=8, updates=1, dyadic=False, kind="norm", loss="squared")
    run = attrs.evolve(run, setup=setup)
    expected = run_ranks(2, train, run)
    for (states, _), (said, after) in zip(
        expected, run_ranks(2, fail_in_forward, run), strict=True
    ):
        assert "boom" in said
        assert differences(states[0], after) == []


ENDED = Run(n=24, batch_size=4, setup=DDP)


def ended(world: af.World, folder: str) -> tuple[object, int, list[str]]:
    """Be ended at update 5, go on, and compare with a run that was not."""

    def end(state: af.TrainState, _: af.Metrics) -> None:
        if state.step == 5 and world.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    go = partial(af.run, step=af.make_step(LOSSES[ENDED.loss]), until=9)
    with af.CheckpointStore(folder, every=2) as store:
        with pytest.raises(SystemExit) as left:
            go(ENDED.state(world), actions={1: end}, store=store)
        saved = store.steps[-1]
        resumed = go(ENDED.state(world), store=store)
    whole = go(ENDED.state(world))
    return left.value.code, saved, differences(tensors(whole), tensors(resumed))


def test_a_signal_to_one_rank_ends_both(tmp_path):
    """Both save the same update and leave with 143; resumed, the run has the same bits."""
    assert run_ranks(2, ended, str(tmp_path / "store")) == [(143, 5, [])] * 2


# branches

OPTIONS = {"find_unused_parameters": True, "reshard_after_forward": True}
PARTS = Branching(
    stages=(("experts", (1, 3, 2)), ("tower", (2,)), ("experts", (2, 2))),
    n=12,
    batch_size=8,
    wrap="wrap_fsdp",
    options={**OPTIONS, "keep_grads": "whole"},
    units="lists",
    axes={"dp_shard": 2},
    micro=2,
    recomputes=True,
    asks=True,
    seed=3,
)
COPIES = attrs.evolve(PARTS, axes=HSDP, units="nested")


def branched(world: af.World, run: Branching) -> list[dict[str, torch.Tensor]]:
    """Train in a world whose ranks compare their calls, and in one whose ranks do not."""
    asking = attrs.evolve(world, group=world.connection, checked=True)
    return [run(world, []), run(asking, [])]


@pytest.mark.parametrize("run", [PARTS, COPIES], ids=["parts", "copies of parts"])
def test_processes_run_other_units(run):
    """A training and an evaluation by Gloo, whose parts of unequal units would not fit."""
    alone = run(af.World.single(device="cpu"), [])
    for worlds in run_ranks(prod(run.axes.values()), branched, run, axes=run.axes):
        for found in worlds:
            assert differences(alone, found, within=1e-12) == []


# a user's own `reduce`


@af.transform
class FromUpdate:
    """Sum as one must, and from some update on with this rank's own weight."""

    update: int

    def reduce(self, grads, slot, update):
        summed, slot = SumAll().reduce(grads, slot, update)
        if update.num_tried < self.update:
            return summed, slot
        return grads.with_sums(summed.tensors, grads.weight), slot


@pytest.mark.parametrize("reduce", [SumAll(), GatherAll()], ids=repr)
def test_real_ranks_sum_as_simulated_ones(reduce):
    """A7: on two ranks there is one order of sums, and so one result, bitwise."""
    setup = af.chain(af.shard_data(), reduce)
    run = Run(n=7, batch_size=3, updates=4, dyadic=False, setup=setup)
    simulate(2, partial(train, run=run), also="processes")


def told(world: af.World, run: Run, checked: bool) -> str:
    """Return what a rank is told."""
    world = attrs.evolve(world, group=world.connection, checked=checked)
    with pytest.raises(af.errors.ReplicaMismatchError) as caught:
        train(world, run)
    return str(caught.value)


@pytest.mark.parametrize(("update", "checked"), [(0, False), (2, True)])
def test_a_weight_of_one_rank_is_told_to_all(update, checked):
    """A7: real ranks compare in the first update, and in any where the world is checked."""
    setup = af.chain(af.shard_data(), FromUpdate(update))
    run = Run(n=9, batch_size=3, updates=3, setup=setup)
    for text in run_ranks(2, told, run, checked):
        assert "\n  rank 0: the weight: 2.0\n  rank 1: the weight: 1.0\n" in text


def means(world: af.World, names: list[list[str]]) -> str:
    """Return what a rank is told of the means of its own names, each of which is 1."""
    metrics = af.Metrics(dict.fromkeys(names[world.rank], (2.0, 2.0)))
    try:
        return repr(metrics.all_reduce_mean(world))
    except af.errors.CollectiveMismatchError as error:
        return str(error)


@pytest.mark.parametrize("more", [1, 4, 5, 9])
def test_metrics_of_fewer_names_are_told(more):
    """Gloo would abort the rank that gets more than it expects; as many names are added up."""
    many = [f"class {number}" for number in range(1 + more)]
    for text in run_ranks(2, means, [many[:1], many]):
        assert "the ranks have metrics with different names" in text
        assert '\n  rank 0: ["class 0"]\n  rank 1: ["class 0", "class 1"' in text
    assert run_ranks(2, means, [many, many]) == [repr(dict.fromkeys(many, 1.0))] * 2
