# SPDX-License-Identifier: Apache-2.0
"""What a simulated world gives, real ranks joined by Gloo give, bit by bit.

And where they do not, `simulate(also="processes")` says so.
"""

import multiprocessing
import os
import random
from functools import partial
from typing import Any

import attrs
import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

import accelfn as af
from accelfn.errors import LawError
from accelfn.testing import simulate
from tests.laws.reducing import GatherAll, SumAll
from tests.processes import run_ranks
from tests.ranks import programs, programs_of_parts
from tests.ranks import programs_of_trees as trees
from tests.ranks.programs_of_trees import TreeCall, tree_calls
from tests.strategies import Run, runs
from tests.unit.test_differential import PAIRS

pytestmark = pytest.mark.ranks(2)
on_both = partial(simulate, also="processes")
"""Run a program on simulated ranks and on processes, which must give the same."""


def on_process(world: af.World) -> bool:
    """Whether this is rank 1 of a world of processes, where a difference is planted."""
    return multiprocessing.parent_process() is not None and world.rank == 1


def equal(world: af.World) -> list[object]:
    """Return the same in both worlds, made anew in each."""
    run = Run(setup=af.chain(af.shard_data(), af.wrap_ddp(), af.ema(0.5)))
    return [run.train(run.state(world))[0], *(two for _, two, _ in PAIRS.values())]


def draws(world: af.World) -> dict[str, Any]:
    return {
        "torch": torch.randn(3) + world.rank,
        "numpy": np.random.rand(2),  # noqa: NPY002 - the one that ranks share
        "python": random.random(),  # noqa: S311
    }


def fails_on_processes(world: af.World) -> None:
    if on_process(world):
        raise KeyError("only here")


def variable(world: af.World) -> tuple[int, str | None]:
    """Return what the environment says of the rank, as no program should ask it."""
    return world.rank, os.environ.get("RANK")


def strided(world: af.World) -> torch.Tensor:
    """Reduce a tensor with gaps, which Gloo does wrong without a word."""
    x = torch.arange(6, dtype=torch.float64)[::2]
    dist.all_reduce(x, group=world.group)
    return x


def moved_state(world: af.World) -> af.TrainState:
    run = Run(setup=af.chain(af.shard_data(), af.wrap_ddp()))
    trained, _ = run.train(run.state(world))
    params = {name: param.clone() for name, param in trained.params.items()}
    if on_process(world):
        params["head.bias"].view(torch.int64)[1] += 1
    return trained.with_params(params)


FLOATS = ("float64", "float32", "bfloat16", "float16")
INTEGERS = ("int64", "int32", "int8", "uint8")
DTYPES = (*FLOATS, *INTEGERS, "bool")  # Gloo gathers no complex numbers
REDUCTIONS = (
    *((name, dtype) for name in ("SUM", "PRODUCT") for dtype in (*FLOATS, *INTEGERS)),
    *((name, dtype) for name in ("MIN", "MAX") for dtype in (*FLOATS, *INTEGERS)),
    *((name, dtype) for name in ("BAND", "BOR", "BXOR") for dtype in INTEGERS),
    *(("AVG", dtype) for dtype in FLOATS),
    *(("SUM", dtype) for dtype in ("bool", "complex64")),
)


KINDS = """
    all_reduce reduce broadcast all_gather all_gather_single gather scatter reduce_scatter
    reduce_scatter_single all_to_all all_to_all_uneven barrier send_recv recv_from_any ring
    all_gather_object broadcast_object
""".split()  # noqa: SIM905 - one a line is long


@attrs.frozen
class Collective:
    """One call of a program, the same on all ranks but for their data.

    Attributes:
        kind: which of `KINDS`.
        numbers: small integers, which each rank takes in a turn of its own as its data.
        length: how many of them a rank's tensor has.
        reduction: of those that reduce, by name, and the dtype.
        root: the rank that sends or receives, modulo the world's size.
        is_async: whether it is waited for at the end of the program only.
    """

    kind: str
    numbers: tuple[int, ...] = (1,)
    length: int = 1
    reduction: tuple[str, str] = ("SUM", "float64")
    root: int = 0
    is_async: bool = False

    def data(self, rank: int, count: int) -> torch.Tensor:
        turned = [self.numbers[(rank + i) % len(self.numbers)] for i in range(count)]
        return torch.tensor(turned).to(getattr(torch, self.reduction[1]))

    def call(self, world: af.World) -> tuple[Any, Any]:  # noqa: C901, PLR0911, PLR0912
        """Return a work to wait for, or None; and what will hold the results then."""
        rank, size, root = world.rank, world.size, self.root % world.size
        g: dict[str, Any] = {"group": world.group}
        options: dict[str, Any] = {**g, "async_op": self.is_async}
        op = {"op": getattr(dist.ReduceOp, self.reduction[0])}
        x, whole = (self.data(rank, parts * self.length) for parts in (1, size))
        got, gathered = torch.zeros_like(x), torch.zeros_like(whole)
        parts, each = [*whole.chunk(size)], [torch.zeros_like(x) for _ in range(size)]
        receiver = (root + 1) % size
        match self.kind:
            case "all_reduce":
                return dist.all_reduce(x, **op, **options), x
            case "reduce":  # some backends tear the others' results
                work = dist.reduce(x, dst=root, **op, **options)
                return work, x if rank == root else None
            case "broadcast":
                return dist.broadcast(x, src=root, **options), x
            case "all_gather":
                return dist.all_gather(each, x, **options), each
            case "all_gather_single":
                return dist.all_gather_single(gathered, x, **options), gathered
            case "gather":
                results = each if rank == root else None
                return dist.gather(x, results, dst=root, **options), results
            case "scatter":
                given = parts if rank == root else None
                return dist.scatter(got, given, src=root, **options), got
            case "reduce_scatter":
                return dist.reduce_scatter(got, parts, **op, **options), got
            case "reduce_scatter_single":
                return dist.reduce_scatter_single(got, whole, **op, **options), got
            case "all_to_all":
                return dist.all_to_all(each, parts, **options), each
            case "all_to_all_uneven":  # one row more to each rank: no two get the same
                counts = [self.length + r for r in range(size)]
                given, takes = self.data(rank, sum(counts)), [counts[rank]] * size
                got = torch.zeros(sum(takes), dtype=x.dtype)
                work = dist.all_to_all_single(got, given, takes, counts, **options)
                return work, got
            case "barrier":
                return dist.barrier(**options), None
            case "send_recv" | "recv_from_any":
                is_told = self.kind == "send_recv"
                tag, found = {"tag": self.length} if is_told else {}, None
                if rank == root:
                    dist.send(x, dst=receiver, **tag, **g)
                elif rank == receiver:
                    found = dist.recv(x, src=root if is_told else None, **tag, **g)
                return None, (found, x)
            case "ring":
                after, before = ((rank + i) % size for i in (1, -1))
                sends = dist.P2POp(dist.isend, x, after, **g)
                takes = dist.P2POp(dist.irecv, got, before, **g)
                for work in dist.batch_isend_irecv([sends, takes]):
                    work.wait()
                return None, got
            case "all_gather_object":
                found: list[Any] = [None] * size
                mine = {"rank": rank, "numbers": self.numbers}
                dist.all_gather_object(found, mine, **g)
                return None, found
        assert self.kind == "broadcast_object"
        carried: list[Any] = [rank, self.numbers]
        dist.broadcast_object_list(carried, src=root, **g)
        return None, carried


def call_all(world: af.World, program: tuple[Collective, ...]) -> list[Any]:
    """Run a program; return what each call gave, those to be awaited waited for last."""
    posted = [each.call(world) for each in program]
    for work, _ in reversed(posted):
        if work is not None:
            work.wait()
    return [results for _, results in posted]


# different ones, so that no part of a tensor passes for another
NUMBERS = st.lists(st.integers(-3, 3), min_size=3, max_size=5, unique=True)
schedules = st.lists(st.integers(0, 2), max_size=8)


@st.composite
def calls(draw: st.DrawFn) -> Collective:
    """Draw one collective on small integers, which every sum of floats keeps exact."""
    kind = draw(st.sampled_from(sorted(KINDS)))
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
    on_both(size, partial(call_all, program=tuple(program)), schedule=schedule)


@given(programs_of_parts.programs_along_axes(most=4))
def test_calls_along_axes_give_what_gloo_gives(
    program: programs_of_parts.Program,
) -> None:
    """Any program along any axes, of collectives, messages, functional ones and DTensors."""
    on_both(program.size, program, axes=program.axes)


@settings(max_examples=8)
@given(programs_of_parts.programs(sizes=(1, 2, 4)))
def test_calls_in_parts_give_what_gloo_gives(
    program: programs_of_parts.Program,
) -> None:
    """Any program in any parts, by size and by machine, whoever else calls."""
    on_both(program.size, program)


@given(st.lists(tree_calls(), max_size=6), st.sampled_from([2, 2, 3]), schedules)
def test_collectives_on_trees_give_what_gloo_gives(
    program: list[TreeCall], size: int, schedule: list[int]
) -> None:
    """Any program of gather, reduce and their kin: any dtype, ragged rows, any layout."""
    on_both(size, partial(trees.run, program=tuple(program)), schedule=schedule)


def test_numbers_at_their_limits_give_what_gloo_gives():
    """NaN wins and no mean overflows on either, whichever rank has what."""
    for size in (2, 3):
        on_both(size, trees.at_limits)


@pytest.mark.parametrize("dtype", trees.DTYPES)
def test_every_dtype_gives_what_gloo_gives(dtype):
    """Moved by each kind of call, and reduced in each way that it can be."""
    kinds = [each for each in trees.KINDS if each != "reduce"]
    ops = () if dtype in trees.ONLY_MOVED else trees.OPS
    program = (
        *(TreeCall(kind, (dtype, dtype), (1, 2), root=1) for kind in kinds),
        *(TreeCall("reduce", (dtype, dtype), op=op, transposed=True) for op in ops),
    )
    on_both(2, partial(trees.run, program=program))


@pytest.mark.parametrize("size", [2, 3])
def test_every_collective_gives_what_gloo_gives(size):
    """Each kind, from every root, awaited at once and later."""
    program = tuple(
        Collective(kind, (1, -2, 3), 2, root=root, is_async=is_async)
        for kind in KINDS
        for root in range(3)
        for is_async in (False, True)
    )
    on_both(size, partial(call_all, program=program))


ENGINES = [
    af.wrap_ddp(),
    af.wrap_ddp(gradient_as_bucket_view=False),
    af.wrap_ddp(bucket_cap_mb=1e-5),
    af.local_sgd(sync_every=1),
    af.local_sgd(sync_every=2),
    af.diloco(sync_every=1),
    af.diloco(sync_every=2, bits=8, delay=1, mix=0.5),
    af.diloco(sync_every=2, bits=4, fragments=2),
    SumAll(),
    GatherAll(),
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
    on_both(2, partial(programs.train, run=run), schedule=schedule)


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
    on_both(2, partial(programs.train, run=run), schedule=schedule)


def test_equal_results_pass():
    """What differs above is found equal to itself."""
    on_both(2, equal)


@pytest.mark.parametrize("seed", [0, 7])
def test_generators_are_seeded_alike(seed):
    """Each rank draws in a process what it draws in a simulated world."""
    run = on_both(2, draws, seed=seed)
    assert run[0]["python"] != run[1]["python"]


@pytest.mark.parametrize(
    ("program", "said"),
    [
        (fails_on_processes, "(?s)Rank 1 of 2.*KeyError: 'only here'"),
        (variable, r"result\[1\]: None and '0'"),
        (strided, r"at \[2\]: 8.0 and 4.0"),
        (moved_state, r"(?s)Rank 1 of 2.*\.params\['head.bias'\]: .* at \[1\]"),
    ],
)
def test_what_processes_do_otherwise_is_found(program, said):
    """An error, a variable, what Gloo does wrong, and one bit of a state."""
    with pytest.raises(LawError, match=said):
        on_both(2, program)


def test_parts_wait_as_long_as_their_world():
    """Where a rank hangs, those of its part end when those of the world do."""
    found = run_ranks(4, programs_of_parts.seconds)
    assert len({each for rank in found for each in rank}) == 1
