# SPDX-License-Identifier: Apache-2.0
"""What a simulated world gives, real ranks joined by Gloo give, bit by bit.

And where they do not, `simulate(also="processes")` says so.
"""

from functools import partial

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import accelfn as af
from accelfn.errors import LawError
from accelfn.testing import Raise, simulate
from tests.processes import run_ranks
from tests.ranks import programs, programs_of_axes, programs_of_parts
from tests.ranks import programs_of_collectives as collectives
from tests.ranks import programs_of_differences as differences
from tests.ranks import programs_of_trees as trees
from tests.ranks.programs_of_collectives import CALLS, DTYPES, REDUCTIONS, Collective
from tests.ranks.programs_of_trees import TreeCall, tree_calls
from tests.strategies import Run, runs

pytestmark = pytest.mark.ranks(2)

# different ones, so that no part of a tensor passes for another
NUMBERS = st.lists(st.integers(-3, 3), min_size=3, max_size=5, unique=True)
schedules = st.lists(st.integers(0, 2), max_size=8)


@st.composite
def calls(draw: st.DrawFn) -> Collective:
    """Draw one collective on small integers, which every sum of floats keeps exact."""
    kind = draw(st.sampled_from(sorted(CALLS)))
    moved = [("SUM", dtype) for dtype in DTYPES]
    return Collective(
        kind,
        numbers=tuple(draw(NUMBERS)),
        length=draw(st.integers(1, 4)),
        reduction=draw(st.sampled_from(REDUCTIONS if "reduce" in kind else moved)),
        root=draw(st.integers(0, 2)),
        is_async=draw(st.booleans()),
    )


@given(st.lists(calls(), max_size=6), st.sampled_from([2, 2, 3]), schedules)
def test_collectives_give_what_gloo_gives(
    program: list[Collective], size: int, schedule: list[int]
) -> None:
    """Any program of any collectives, waited for or not, under any schedule."""
    run = partial(collectives.run, program=tuple(program))
    simulate(size, run, schedule=schedule, also="processes")


@given(programs_of_axes.programs(most=4))
def test_calls_along_axes_give_what_gloo_gives(
    program: programs_of_axes.Program,
) -> None:
    """Any program along any axes, of collectives, messages, functional ones and DTensors."""
    simulate(program.size, program, axes=program.axes, also="processes")


@settings(max_examples=8)
@given(programs_of_parts.programs(sizes=(1, 2, 4)))
def test_calls_in_parts_give_what_gloo_gives(
    program: programs_of_parts.Program,
) -> None:
    """Any program in any parts, by size and by machine, whoever else calls."""
    simulate(program.size, program, also="processes")


@given(st.lists(tree_calls(), max_size=6), st.sampled_from([2, 2, 3]), schedules)
def test_collectives_on_trees_give_what_gloo_gives(
    program: list[TreeCall], size: int, schedule: list[int]
) -> None:
    """Any program of gather, reduce and their kin: any dtype, ragged rows, any layout."""
    run = partial(trees.run, program=tuple(program))
    simulate(size, run, schedule=schedule, also="processes")


def test_numbers_at_their_limits_give_what_gloo_gives():
    """NaN wins and no mean overflows on either, whichever rank has what."""
    for size in (2, 3):
        simulate(size, trees.at_limits, also="processes")


@pytest.mark.parametrize("dtype", trees.DTYPES)
def test_every_dtype_gives_what_gloo_gives(dtype):
    """Moved by each kind of call, and reduced in each way that it can be."""
    kinds = [each for each in trees.KINDS if each != "reduce"]
    ops = () if dtype in trees.ONLY_MOVED else trees.OPS
    program = (
        *(TreeCall(kind, (dtype, dtype), (1, 2), root=1) for kind in kinds),
        *(TreeCall("reduce", (dtype, dtype), op=op, transposed=True) for op in ops),
    )
    simulate(2, partial(trees.run, program=program), also="processes")


@pytest.mark.parametrize("kind", CALLS)
@pytest.mark.parametrize("size", [2, 3])
def test_every_collective_gives_what_gloo_gives(kind, size):
    """Each kind alone, from every root, awaited at once and later."""
    program = tuple(
        Collective(kind, (1, -2, 3), 2, root=root, is_async=is_async)
        for root in range(3)
        for is_async in (False, True)
    )
    simulate(size, partial(collectives.run, program=program), also="processes")


ENGINES = [
    af.wrap_ddp(),
    af.wrap_ddp(gradient_as_bucket_view=False),
    af.wrap_ddp(bucket_cap_mb=1e-5),
    af.local_sgd(sync_every=1),
    af.local_sgd(sync_every=2),
    af.diloco(sync_every=1),
    af.diloco(sync_every=2, bits=8, delay=1, mix=0.5),
    af.diloco(sync_every=2, bits=4, fragments=2),
]
BESIDE = [
    af.accumulate(num_micro_batches=2),
    af.clip_grad_norm(0.5),
    af.clip_grad_value(0.125),
    af.ema(0.5),
    af.autocast("bf16"),
]


@st.composite
def trainings(draw: st.DrawFn) -> Run:
    """Draw a run of two ranks, with an engine and what may stand beside it."""
    engine = draw(st.sampled_from(ENGINES))
    beside = draw(st.lists(st.sampled_from(BESIDE), unique_by=lambda each: each.name))
    if isinstance(engine, af.diloco):  # it says what is evaluated
        beside = [each for each in beside if not isinstance(each, af.ema)]
    setup = af.chain(*draw(st.permutations([af.shard_data(), engine, *beside])))
    run = attrs.evolve(draw(runs(updates=2)), setup=setup)
    kind = draw(st.sampled_from([run.kind, "dropout", "norm", "unused"]))
    if kind == "norm":  # two rows for each of two micro-batches of two ranks
        return attrs.evolve(run, kind=kind, n=8, batch_size=8)
    if kind == "unused":
        engine = af.wrap_ddp(find_unused_parameters=True)
        setup = af.chain(af.shard_data(), engine, *beside)
        return attrs.evolve(run, kind=kind, setup=setup)
    return attrs.evolve(run, kind=kind)


@given(trainings(), schedules)
def test_training_gives_what_gloo_gives(run: Run, schedule: list[int]) -> None:
    """Every state and metric of a run, on any data: two ranks add in either order alike."""
    simulate(2, partial(programs.train, run=run), schedule=schedule, also="processes")


COMPRESSED = [
    af.compress_grads("fp16"),
    af.compress_grads("bf16"),
    af.compress_grads("powersgd", start_powerSGD_iter=1, min_compression_rate=0),
    af.optimizer_in_backward(),
]


@given(
    run=runs(updates=3, dyadic=False),
    method=st.sampled_from(COMPRESSED),
    bucket=st.sampled_from([None, 1e-5]),
    schedule=schedules,
)
def test_compressed_training_gives_what_gloo_gives(
    run: Run, method: object, bucket: float | None, schedule: list[int]
) -> None:
    """Through DistributedDataParallel's hook gradients are the same on any ranks."""
    ddp = af.wrap_ddp(bucket_cap_mb=bucket)
    run = attrs.evolve(run, setup=af.chain(af.shard_data(), ddp, method))
    simulate(2, partial(programs.train, run=run), schedule=schedule, also="processes")


def test_synced_batchnorm_gives_what_gloo_gives():
    """Statistics of two ranks, and gradients through them, are the same on any ranks."""
    setup = af.chain(af.shard_data(), af.wrap_ddp(), af.sync_batchnorm())
    run = Run(n=11, batch_size=4, kind="norm", updates=4, dyadic=False, setup=setup)
    simulate(2, partial(programs.train, run=run), also="processes")


def test_a_state_is_compared_in_what_is_saved_of_it():
    """Two states pass; one bit of one parameter on one rank is named."""
    run = Run(setup=af.chain(af.shard_data(), af.wrap_ddp(), af.ema(0.5)))
    simulate(2, partial(differences.state, run=run), also="processes")
    with pytest.raises(
        LawError, match=r"(?s)Rank 1 of 2.*\.params\['head.bias'\]: .* at \[1\]"
    ):
        simulate(2, partial(differences.moved_state, run=run), also="processes")


@pytest.mark.parametrize("name", differences.PAIRS)
def test_a_difference_is_named(name):
    """By rank, place and both values; and the run that shows it."""
    with pytest.raises(LawError, match=differences.PAIRS[name][2]) as raised:
        simulate(2, partial(differences.planted, name=name), also="processes")
    assert str(raised.value).startswith("Rank 1 of 2 ")
    assert "accelfn.testing.simulate(2, " in str(raised.value)


@pytest.mark.parametrize("name", differences.PAIRS)
def test_equal_results_pass(name):
    """What differs above is found equal to itself."""
    simulate(2, partial(differences.equal, name=name), also="processes")


@pytest.mark.parametrize("name", differences.INCOMPARABLE)
def test_what_cannot_be_compared_is_refused(name):
    """It never passes for equal."""
    with pytest.raises(
        af.errors.ArgumentError, match=r"\['inside'\]\[0\]\._field.*cannot compare"
    ):
        simulate(2, partial(differences.incomparable, name=name), also="processes")


@pytest.mark.parametrize("seed", [0, 7])
def test_generators_are_seeded_alike(seed):
    """Each rank draws in a process what it draws in a simulated world."""
    run = simulate(2, differences.draws, seed=seed, also="processes")
    assert run[0]["python"] != run[1]["python"]


@pytest.mark.parametrize(
    "mode",
    [
        torch.no_grad,
        torch.inference_mode,
        partial(torch.autocast, "cpu", torch.bfloat16),
    ],
    ids=["no_grad", "inference_mode", "autocast"],
)
def test_modes_are_the_callers(mode):
    """Processes compute under the modes of whoever simulates."""
    with mode():
        simulate(2, differences.modes, also="processes")


def test_a_program_that_fails_on_processes_only_breaks_the_law():
    """The error has the traceback of the rank."""
    with pytest.raises(LawError, match="(?s)Rank 1 of 2.*KeyError: 'only here'"):
        simulate(2, differences.fails_on_processes, also="processes")


def test_a_program_that_reads_its_rank_from_the_environment_is_found():
    """Simulated ranks have no environment of their own."""
    with pytest.raises(LawError, match=r"result\[1\]: None and '0'"):
        simulate(2, differences.variable, also="processes")


def test_what_gloo_does_wrong_is_found():
    """A tensor with gaps is reduced as it should be in a cannot have planned."""
    with pytest.raises(LawError, match=r"at \[2\]: 8.0 and 4.0"):
        simulate(2, differences.strided, also="processes")


def test_faults_are_refused():
    """They cannot happen to processes."""
    with pytest.raises(
        af.errors.ArgumentError, match=r"Raise\(rank=1.*cannot have planned"
    ):
        simulate(2, differences.draws, faults=[Raise(1)], also="processes")


def test_a_program_that_cannot_be_sent_is_refused():
    """A lambda has no name by which another process could import it."""
    with pytest.raises(af.errors.ArgumentError, match='also="processes".*is a lambda'):
        simulate(2, lambda world: world.rank, also="processes")


def test_parts_wait_as_long_as_their_world():
    """Where a rank hangs, those of its part end when those of the world do."""
    found = run_ranks(4, programs_of_parts.seconds)
    assert len({each for rank in found for each in rank}) == 1
