# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's ZeRO, on real processes: the numbers of one rank, and states that do not meet."""

import importlib.util
import re
import tempfile
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import accelfn as af
from accelfn.testing import run_processes
from tests.laws.histories import Acts, acts
from tests.laws.split_models import Block, Run, runs
from tests.processes import RankError, run_ranks
from tests.ranks.programs_of_broken_zero import Part, broken_off
from tests.ranks.programs_of_zero import (
    Trained,
    astray,
    buffers,
    calls,
    clipped,
    forgotten,
    frozen,
    histories,
    judged,
    large_weights,
    layers_of_others,
    layouts,
    mistakes,
    numbers,
    odd_optimizers,
    orders,
    parted_again,
    readings,
    released,
    skips,
    stages,
    starts_of_processes,
    sums,
    thawing,
    thrown_away,
    unused,
    ways,
)
from tests.ranks.test_failures import launch
from tests.strategies import differences, tensors

NO_DEEPSPEED = importlib.util.find_spec("deepspeed") is None

pytestmark = [
    pytest.mark.ranks(2),
    pytest.mark.skipif(NO_DEEPSPEED, reason="deepspeed is not installed"),
]

BEHIND = (af.clip_grad_norm(0.3), af.ema(0.5), af.checkpoint_activations(Block))
zeros = st.builds(
    af.wrap_deepspeed,
    st.sampled_from([1, 2, 3]),
    keep_grads=st.sampled_from(["whole", "sharded"]),
    config=st.sampled_from(
        [
            {},
            {"zero_optimization": {"stage3_param_persistence_threshold": 0}},
            {"zero_optimization": {"sub_group_size": 30, "reduce_bucket_size": 20}},
            {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
            {"zero_optimization": {"round_robin_gradients": True}},
        ]
    ),
)
trainings = st.builds(
    Trained,
    runs(dtype=torch.float32).flatmap(
        lambda run: st.builds(
            lambda optimizer, behind: Run(
                run.n,
                run.batch_size,
                run.loss,
                optimizer,
                run.in_list,
                run.micro,
                tuple(behind),
                torch.float32,
                run.seed,
            ),
            st.sampled_from(["adamw", "momentum", "sgd"]),
            st.lists(st.sampled_from(BEHIND), unique_by=lambda each: each.name),
        )
    ),
    zeros,
)


def with_stage(stage: int) -> st.SearchStrategy[Trained]:
    """Return trainings of one stage."""

    def of(each: Trained) -> Trained:
        return attrs.evolve(each, engine=attrs.evolve(each.engine, stage=stage))

    return trainings.map(of)


def plain(found: Any) -> dict[str, torch.Tensor]:
    """Return what is compared with one rank, without what only DeepSpeed tells."""
    return {
        name: torch.as_tensor(value, dtype=torch.float64)
        for name, value in dict(found).items()
        if name not in ("skipped", "buffers.seen")
    }


def differing(one: Any, other: Any) -> list[str]:
    """Return where two differ by more than 1e-6 of the largest number there, or of 1.

    What an optimizer keeps is given 4e-6: rounding alone drives its sums of gradients apart,
    under `wrap_ddp` as far.
    """
    one, other = plain(one), plain(other)
    largest = {
        name: max(1.0, float(each.abs().amax()) if each.numel() else 0.0)
        * (4 if name.startswith("opt_state.") else 1)
        for name, each in one.items()
    }
    ours, theirs = (
        {name: each / largest.get(name, 1.0) for name, each in found.items()}
        for found in (one, other)
    )
    return differences(ours, theirs, within=1e-6)


# ranks are started anew for each example: to look for a smaller one takes minutes
few = settings(max_examples=2, phases=[Phase.explicit, Phase.generate])
engines = zeros | st.sampled_from([af.wrap_fsdp(), af.wrap_ddp()])


PARTS = st.floats(0, 1, exclude_max=True)


@few
@given(
    several=st.tuples(*(with_stage(stage) for stage in (1, 2, 3))),
    parts=st.lists(st.tuples(PARTS, PARTS, PARTS), min_size=12, max_size=12),
    kind=st.sampled_from(["Broken", "MemoryError"]),
)
def test_a_step_that_is_broken_off_was_not_begun_or_says_so(
    several: list[Trained], parts: list[Part], kind: str
) -> None:
    """On all ranks at once: a state goes on bitwise in the same engine, or is over."""
    run_ranks(2, broken_off, several, parts, kind)


@few
@given(
    several=st.lists(trainings, min_size=8, max_size=8), size=st.sampled_from([2, 3])
)
def test_it_trains_as_one_rank(several: list[Trained], size: int) -> None:
    """Parameters, optimizer state, averages, metrics and evaluations, to 1e-6."""
    alone = numbers(af.World.single(device="cpu"), several)
    for found in run_ranks(size, numbers, several):
        for each, one, other in zip(several, alone, found, strict=True):
            for ours, theirs in zip(one, other, strict=True):
                assert differing(ours, theirs) == [], each


@few
@given(several=st.lists(st.tuples(trainings, acts), min_size=5, max_size=5))
def test_states_do_not_meet(several: list[tuple[Trained, Acts]]) -> None:
    """Each has, bitwise, what one alone has that was stepped on the same batches."""
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(2, histories, several, folder)


@few
@given(pairs=st.lists(st.tuples(trainings, engines), min_size=5, max_size=5))
def test_what_lies_in_one_layout_lies_in_another(
    pairs: list[tuple[Trained, object]],
) -> None:
    """Saved and loaded, or by with_setup: bitwise, on ranks and in one process; so are exports."""
    with tempfile.TemporaryDirectory() as folder:
        for found in run_ranks(2, layouts, pairs, folder):
            for i, ((each, _), saved) in enumerate(zip(pairs, found, strict=True)):
                alone = each.run.state(af.World.single(device="cpu"))
                loaded = tensors(af.load(alone, Path(folder, str(i), "saved")))
                del saved["buffers.seen"], loaded["buffers.seen"]
                assert differences(saved, loaded) == []


@few
@given(
    several=st.lists(trainings, min_size=4, max_size=4), size=st.sampled_from([2, 3])
)
def test_an_update_that_is_not_finite_is_left_out_by_all(
    several: list[Trained], size: int
) -> None:
    """It is counted, and what follows is what skip_nonfinite gives under wrap_fsdp."""
    several = [
        attrs.evolve(e, run=attrs.evolve(e.run, loss="mean", n=8, batch_size=6))
        for e in several
    ]
    split = [attrs.evolve(e, engine=SKIPPING) for e in several]
    beside = [
        attrs.evolve(e, engine=af.chain(e.engine, af.skip_nonfinite())) for e in several
    ]
    ours, same, theirs = (run_ranks(size, skips, e) for e in (several, beside, split))
    for one, other in zip(same[0], theirs[0], strict=True):
        assert differing(other, one) == []
    for one, other in zip(ours[0], theirs[0], strict=True):
        alike = {n: v for n, v in other.items() if not n.startswith("slots.skip")}
        assert differing(alike, one) == []


SKIPPING = af.chain(af.wrap_fsdp(), af.skip_nonfinite())


APART = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}
"""Nothing is kept whole for being small."""
RUN = Run(9, 9, "mean", "adamw", in_list=True, micro=1, dtype=torch.float32)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_loss_may_be_nan_beside_skip_nonfinite(stage):
    """As under wrap_fsdp: too many in a row are told, and the state is as it was."""
    run_ranks(2, judged, Trained(RUN, af.wrap_deepspeed(stage)))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_that_deepspeed_holds_are_seen_by_nobody(stage):
    """Nor are they mistaken for others, and every parameter takes part."""
    run_ranks(2, mistakes, Trained(RUN, af.wrap_deepspeed(stage, config=APART)))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_meet_those_of_the_same_parameters(stage):
    """In whichever order they come; at stage 3, where modules are gathered, all are told."""
    small = {"reduce_bucket_size": 20, "stage3_param_persistence_threshold": 0}
    config = {"zero_optimization": small}
    run_ranks(2, orders, Trained(RUN, af.wrap_deepspeed(stage, config=config)))


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("micro", [1, 2])
def test_ranks_that_use_other_parameters_are_told(stage, micro):
    """All of them, by rank and name, and go on."""
    run = attrs.evolve(RUN, micro=micro)
    run_ranks(2, unused, Trained(run, af.wrap_deepspeed(stage)))
    run_ranks(2, unused, Trained(run, af.wrap_deepspeed(stage, config=APART)))


@pytest.mark.parametrize("stage", [2, 3])
def test_ranks_may_use_a_model_in_other_ways_together(stage):
    """What a rank leaves the known way for, it asks the others."""
    run_ranks(2, ways, Trained(RUN, af.wrap_deepspeed(stage, config=APART)))


def test_a_rank_that_goes_astray_is_told():
    """And those that wait for it hear of it, as soon as it gives up."""
    each = Trained(RUN, af.wrap_deepspeed(3, config=APART))
    with pytest.raises(RankError, match="pass of the loss, rank 1 ran 'f"):
        run_processes(2, astray, each, timeout=45)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_frozen_values_are_those_of_each_state(stage):
    """Stepped in turns, bitwise."""
    run_ranks(2, frozen, Trained(RUN, af.wrap_deepspeed(stage)))
    run_ranks(2, frozen, Trained(RUN, af.wrap_deepspeed(stage, config=APART)))


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_state_goes_from_stage_to_stage(optimizer):
    """By with_setup, there and back, bitwise."""
    run = attrs.evolve(RUN, optimizer=optimizer)
    run_ranks(2, stages, Trained(run, af.wrap_deepspeed(1)))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_update_begins_with_the_buffers_of_rank_0(stage):
    """Whatever the others had."""
    run_ranks(2, buffers, Trained(RUN, af.wrap_deepspeed(stage)))


@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("keep_grads", ["whole", "sharded"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_that_are_thrown_away_leave_nothing(stage, keep_grads, micro):
    """Reduced or not, in the host's memory or not: the next update is bitwise the same."""
    run = attrs.evolve(RUN, micro=micro)
    for zero in ({}, {"offload_optimizer": {"device": "cpu"}}):
        config = {"zero_optimization": zero}
        engine = af.wrap_deepspeed(stage, config=config, keep_grads=keep_grads)
        run_ranks(2, thrown_away, Trained(run, engine))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_of_two_bounds_the_lower_one_holds(stage):
    """In whichever order they are."""
    run_ranks(2, clipped, Trained(RUN, af.wrap_deepspeed(stage)))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_weights_are_exact_beyond_float32(stage):
    """2**24 tokens are no rare batch of a large model."""
    run_ranks(2, large_weights, Trained(RUN, af.wrap_deepspeed(stage)))


@pytest.mark.parametrize("stage", [1, 3])
def test_what_is_frozen_keeps_its_moments(stage):
    """What is thawed has counted other updates than its group, of which there is one count."""
    run_ranks(2, thawing, Trained(RUN, af.wrap_deepspeed(stage)))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_engine_that_is_released_keeps_nothing(stage):
    """But states have what they had, and go on."""
    run_ranks(2, released, Trained(RUN, af.wrap_deepspeed(stage)))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_memory_of_a_state_goes_with_it(stage):
    """An engine that steps another state has no views of it."""
    run_ranks(2, forgotten, Trained(RUN, af.wrap_deepspeed(stage)))


@pytest.mark.parametrize("stage", [1, 3])
def test_optimizers_may_count_by_several_numbers(stage):
    """Which are not taken for elements of a lone number."""
    run_ranks(2, odd_optimizers, Trained(RUN, af.wrap_deepspeed(stage)))


@pytest.mark.parametrize("stage", [1, 3])
def test_nothing_is_brought_into_rows_but_what_is_read(stage):
    """A steady step reads nothing; two fields that are read are read once each."""
    steady, once = run_ranks(2, readings, Trained(RUN, af.wrap_deepspeed(stage)))[0]
    assert (steady, once) == (0, 3)  # parameters, and two moments of each


def test_ranks_that_part_where_ways_have_parted_are_told():
    """Each way is known, and they would wait for one another."""
    each = Trained(RUN, af.wrap_deepspeed(3))
    for told in run_ranks(2, parted_again, each):
        (words,) = told
        assert "left" in words
        assert "right" in words


@pytest.mark.parametrize("stage", [1, 3])
def test_layers_of_other_models_are_torchs_own(stage):
    """Those of DeepSpeed's at stage 3, of other last bits, are there while it runs alone.

    What its logger tells is as the program has set it.
    """
    found = run_ranks(2, layers_of_others, Trained(RUN, af.wrap_deepspeed(stage)))
    assert found == [[stage == 1, True, True]] * 2


@pytest.mark.parametrize("micro", [1, 3])
def test_an_update_starts_no_process(micro):
    """DeepSpeed has one list the host's cores at each reduction of stage 3."""
    each = Trained(attrs.evolve(RUN, micro=micro), af.wrap_deepspeed(3))
    assert run_ranks(2, starts_of_processes, each) == [(0, True)] * 2


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_update_is_one_reduction(stage):
    """Of several micro-batches too, unless parts are asked for."""
    one, three = run_ranks(2, calls, Trained(RUN, af.wrap_deepspeed(stage)))[0]
    assert one == three
    if stage > 1:
        parts = af.wrap_deepspeed(stage, keep_grads="sharded")
        one, three = run_ranks(2, calls, Trained(RUN, parts))[0]
        assert one < three


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_weights_cross_beside_the_last_sum(stage):
    """They are begun once, before DeepSpeed waits for the sums that close the update."""
    for begun in run_ranks(2, sums, Trained(RUN, af.wrap_deepspeed(stage)))[0]:
        assert begun.count("weights") == 1
        assert begun.index("weights") < len(begun) - 2  # gradients, and their norm


@pytest.mark.parametrize("stage", [1, 3])
def test_a_rank_that_is_gone_is_named(stage):
    """The launcher ends the run at once, and says which rank it was."""
    code, said = launch("accelfn launch", "kill", "1", "60", str(stage))
    assert code == 137
    assert "rank 1 failed first" in said
    assert re.search("rank 0 (followed: PeerFailed|was ended by SIGTERM)", said)
