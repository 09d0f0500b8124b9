# SPDX-License-Identifier: Apache-2.0
"""What is foreseen of a program's traffic is what its simulated ranks send."""

from collections import Counter
from fractions import Fraction
from functools import partial
from typing import Any

import attrs
import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given
from hypothesis import strategies as st

import accelfn as af
from accelfn.testing import Link, Traffic, communication, simulate
from tests.laws.by_messages import (
    MADE_OF,
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    gather,
    reduce,
    reduce_scatter,
    reduce_scatter_single,
    scatter,
)
from tests.laws.worlds import DDP
from tests.strategies import Run, runs

SETUPS = [
    DDP,
    af.chain(DDP, af.compress_grads("bf16")),
    af.chain(DDP, af.compress_grads("powersgd", start_powerSGD_iter=0)),
    af.chain(af.shard_data(), af.local_sgd(sync_every=2)),
    af.chain(af.shard_data(), af.local_sgd(sync_every=1, opt_state=True)),
]
ALGORITHMS = ["ring", "tree", "gloo"]
COLLECTIVES = sorted({each for _, each in MADE_OF}, key=lambda each: each.__name__)


def training(run: Run, *setup: object) -> Any:
    """Return a program that trains, and then tells its metrics to all ranks."""
    split = attrs.evolve(run, setup=af.chain(*setup))

    def program(world: af.World) -> None:
        split.train(split.state(world))
        af.all_gather_objects({"rank": 0}, world, label="who is who")

    return program


@st.composite
def collectives(draw: st.DrawFn) -> Any:
    """Draw a program of collectives, of which some have no label."""
    steps = draw(st.lists(st.tuples(st.sampled_from(COLLECTIVES), st.integers(1, 9))))
    count = draw(st.integers(0, 20))

    def program(world: af.World) -> None:
        for collective, n in steps:
            collective(world, n)
        af.all_reduce(torch.zeros(count), world, "sum", label="a sum")
        af.all_to_all([torch.zeros(count)] * world.size, world, label="for each")
        af.barrier(world)

    return program


@given(
    run=runs(n=24, batch_size=12, updates=2, kind="plain", remainder="short"),
    size=st.sampled_from([2, 3, 4, 5, 8]),
    setup=st.sampled_from(SETUPS),
    drawn=collectives(),
    is_training=st.booleans(),
    algorithm=st.sampled_from(ALGORITHMS),
)
def test_foreseen_bytes_are_those_that_ranks_send(
    run: Run, size: int, setup: object, drawn: Any, is_training: bool, algorithm: Any
) -> None:
    """On 2, 3, 4, 5 and 8 ranks, by label; on one they are 0."""
    program = training(run, setup) if is_training else drawn
    traffic = communication(program)
    sent = simulate(size, program).sent(algorithm=algorithm)
    told = Counter(traffic.bytes(size, algorithm=algorithm))
    told.update(traffic.start(size, algorithm=algorithm))
    assert dict(told) == sent
    assert set(traffic.bytes(1).values()) <= {0}
    assert traffic.bytes(1).keys() == traffic.bytes(2).keys()
    assert traffic.updates == (run.updates if is_training else 0)


@given(
    drawn=collectives(),
    size=st.integers(1, 5),
    algorithm=st.sampled_from(ALGORITHMS),
)
def test_totals_do_not_depend_on_what_tells_them_apart(drawn, size, algorithm):
    """By label, kind, update, group or line, they add up to the same; to 0 for one rank."""
    run = simulate(size, drawn)
    totals = {
        sum(run.sent(by=by, algorithm=algorithm).values())
        for by in ("label", "kind", "step", "group", "site")
    }
    assert len(totals) == 1
    assert size > 1 or totals == {0}


@pytest.mark.parametrize(
    ("algorithm", "collective"),
    [(a, c) for a in ALGORITHMS for c in COLLECTIVES],
    ids=lambda each: getattr(each, "__name__", each),
)
@given(size=st.integers(1, 6), n=st.integers(0, 9))
def test_a_collective_sends_what_its_messages_are(algorithm, collective, size, n):
    """Written out as messages of ranks to ranks, it sends the same bytes."""
    as_a_ring = MADE_OF["ring", collective]
    messages = MADE_OF.get((algorithm, collective), as_a_ring)
    run = simulate(size, lambda world: collective(world, n))
    written_out = simulate(size, lambda world: messages(world, n))
    sent, expected = run.sent(algorithm=algorithm), written_out.sent()
    assert sum(expected.values()) == sum(sent.values())


@given(size=st.integers(2, 6), n=st.integers(1, 9), root=st.integers(0, 5))
def test_totals_of_a_broadcast_are_the_roots(size: int, n: int, root: int) -> None:
    """Whatever other ranks have there, it gives n bytes to each of them."""

    def program(world: af.World) -> None:
        values = torch.full((n,), world.rank, dtype=torch.uint8)
        af.broadcast(values, world, root=root % size, label="from one")

    run = simulate(size, program)
    assert run.sent() == {"from one": (size - 1) * n}
    at_the_root = [n if rank == root % size else 0 for rank in range(size)]
    assert list(run.log[-1].for_others) == at_the_root


@given(
    run=runs(n=24, batch_size=12, kind="plain"),
    every=st.integers(1, 3),
    size=st.sampled_from([1, 2, 7, 64]),
)
def test_local_sgd_sends_what_ddp_sends_divided_by_its_period(run, every, size):
    """Exactly, on any number of ranks, the weights that both send along among it."""

    def sent(*setup: object) -> Fraction:
        program = training(attrs.evolve(run, updates=every), *setup)
        traffic = communication(program)
        sent = traffic.bytes(size)
        sent.pop("who is who")
        return Fraction(sum(sent.values()), traffic.updates)

    local = sent(af.shard_data(), af.local_sgd(sync_every=every))
    assert sent(DDP) / every == local


def buckets(sizes: list[int]) -> Traffic:
    """Return the traffic of an update with so many bytes in each of DDP's buckets."""

    def program(world: af.World) -> None:
        for n in sizes:
            all_reduce(world, n)

    log = simulate(2, program).log
    label = "DistributedDataParallel backward"
    named = tuple(attrs.evolve(entry, label=label, step=0) for entry in log)
    return Traffic(logs={2: named}, updates=1)


latencies = st.floats(0, 1)
bandwidths = st.floats(1, 1e9)


@given(
    drawn=collectives(),
    size=st.integers(1, 9),
    algorithm=st.sampled_from(ALGORITHMS),
    latency=st.tuples(latencies, latencies).map(sorted),
    bandwidth=st.tuples(bandwidths, bandwidths).map(sorted),
    overhead=st.tuples(latencies, latencies).map(sorted),
)
def test_seconds_are_monotone(drawn, size, algorithm, latency, bandwidth, overhead):
    """A slower link is never faster; on one rank there is none to wait for."""
    traffic = communication(drawn)
    link = Link(latency=latency[0], bandwidth=bandwidth[1], overhead=overhead[0])
    best = traffic.seconds(link, ranks=size, algorithm=algorithm)
    for worse in (
        attrs.evolve(link, latency=latency[1]),
        attrs.evolve(link, bandwidth=bandwidth[0]),
        attrs.evolve(link, overhead=overhead[1]),
    ):
        slower = traffic.seconds(worse, ranks=size, algorithm=algorithm)
        assert slower >= best * (1 - 1e-12)
    assert size > 1 or best == 0


@given(n=st.integers(1, 99), size=st.integers(2, 9), count=st.integers(1, 3))
def test_seconds_are_those_of_the_books(n: int, size: int, count: int) -> None:
    """Of all that a ring or a tree does: of a whole, or of a part for each or from each."""
    link = Link(latency=2.0, bandwidth=0.5)

    def taken(collective: Any, algorithm: Any) -> float:
        def program(world: af.World) -> None:
            for _ in range(count):
                collective(world, n)

        traffic = communication(program)
        return traffic.seconds(link, ranks=size, algorithm=algorithm) / count

    whole, hops, depth = n * size, size - 1, (size - 1).bit_length()
    ring = 2 * hops * 2.0 + 2 * hops / size * whole / 0.5
    tree = 2 * depth * (2.0 + whole / 0.5)
    swap = hops * 2.0 + hops / size * whole / 0.5
    pipe = hops * 2.0 + whole / 0.5
    for expected, collective, algorithm in (
        (ring, all_reduce, "ring"),
        (ring, all_reduce, "gloo"),
        (tree, all_reduce, "tree"),
        (swap, all_to_all, "tree"),
        *((swap, each, "ring") for each in (all_gather, reduce_scatter)),
        *((swap, each, "gloo") for each in (gather, scatter, reduce_scatter_single)),
        (ring, reduce_scatter, "gloo"),
        *((pipe, each, "ring") for each in (broadcast, reduce)),
        *((tree / 2, each, "tree") for each in (broadcast, reduce)),
    ):
        assert taken(collective, algorithm) == pytest.approx(expected)


@given(
    sizes=st.lists(st.integers(1, 99), min_size=1, max_size=4),
    compute=st.floats(0.1, 100),
    overlap=st.floats(0, 1),
)
def test_buckets_are_sent_beside_the_backward_pass(sizes, compute, overlap):
    """An update takes no less than either, no more than both, and as long for one bucket.

    The link sends one after the other: the last is there when some bucket, ready by its share
    of the pass, and all behind it are sent without a pause.
    """
    traffic, link = buckets(sizes), Link(latency=0.5, bandwidth=10.0)
    sent = traffic.seconds(link, ranks=2)
    both = traffic.seconds(link, ranks=2, compute=compute)
    assert both == pytest.approx(compute + sent)
    taken = traffic.seconds(link, ranks=2, compute=compute, overlap=overlap)
    last = 0.5 * 2 + 2 * sizes[-1] / 10.0
    least = max(compute + last, compute * (1 - overlap) + sent)
    assert least * (1 - 1e-9) <= taken <= both * (1 + 1e-9)
    if len(sizes) == 1:
        assert taken == pytest.approx(both)
    each = [0.5 * 2 + 2 * size / 10.0 for size in sizes]
    ready = [
        compute * overlap * sum(sizes[: i + 1]) / sum(sizes) for i in range(len(sizes))
    ]
    there = max(begun + sum(each[i:]) for i, begun in enumerate(ready))
    expected = compute * (1 - overlap) + max(there, compute * overlap)
    assert taken == pytest.approx(expected)


@example(rows=10, kind="gather")  # 5, 4 and 2 on 2, 3 and 5 ranks: on a line that falls
@given(
    rows=st.integers(1, 40),
    kind=st.sampled_from(["gather", "scatter", "squares", "swap", "swap padded"]),
)
def test_what_is_cut_into_parts_is_foreseen_rightly_or_not_at_all(rows, kind):
    """Parts are as large as each other, filled up, or the last ones are smaller."""

    def program(world: af.World) -> None:
        af.barrier(world, label="begin")
        padded = -(-rows // world.size)
        cut = max(0, min(padded, rows - padded * world.rank))
        part = torch.zeros(cut if kind == "swap" else padded, dtype=torch.uint8)
        if kind == "gather":
            af.all_gather(part, world, label="a part")
        elif kind == "scatter":
            reduce_scatter(world, padded)
        elif kind == "squares":
            af.all_reduce(torch.zeros(world.size**2), world, label="a part")
        else:
            af.all_to_all([part] * world.size, world, label="a part")

    traffic = communication(program)
    for size in (3, 4, 6, 7, 8, 9):
        try:
            foreseen = traffic.bytes(size)
        except af.errors.ArgumentError:
            named = "reduce_scatter" if kind == "scatter" else "a part"
            refused(traffic, size, named)
            foreseen = communication(program, ranks=[size]).bytes(size)
        assert foreseen == simulate(size, program).sent()


@given(size=st.integers(6, 99))
def test_other_calls_on_other_ranks_are_refused_by_name(size: int) -> None:
    """Calls that not all worlds make, and calls of some ranks only, which rows make at once."""

    def more(world: af.World) -> None:
        for _ in range(world.size):
            af.barrier(world, label="once a rank")

    def other(world: af.World) -> None:
        label = "of an odd world" if world.size % 2 else "of an even world"
        af.barrier(world, label=label)

    def some(world: af.World) -> None:
        af.barrier(world.along("dp_shard"), label="of a row")

    def hands_on(world: af.World) -> None:
        if world.rank < 2:
            dist_send(world)

    refused(communication(more), size, "once a rank")
    refused(communication(other), size, "of an odd world")
    axes = {"dp_replicate": 2, "dp_shard": -1}
    of_rows = communication(some, ranks=(4, 6, 8), axes=axes)
    assert of_rows.bytes(8) == simulate(8, some, axes=axes).sent()
    refused(of_rows, 2 * size, "of a row")
    link = Link(latency=1.0, bandwidth=1.0)
    alone = communication(partial(af.barrier, label="of a row"), ranks=[4])
    assert of_rows.seconds(link, ranks=8) == alone.seconds(link, ranks=4)
    refused(communication(hands_on), size, "send")
    refused(communication(af.barrier, ranks=(2, 3)), size, "only on 2 and 3 ranks")


def dist_send(world: af.World) -> None:
    """Give one byte to rank 1."""
    byte = torch.zeros(1, dtype=torch.uint8)
    if world.rank:
        dist.recv(byte, group_src=0, group=world.group)
    else:
        dist.send(byte, group_dst=1, group=world.group)


def refused(traffic: Traffic, ranks: int, named: str) -> None:
    with pytest.raises(af.errors.ArgumentError, match="cannot predict") as error:
        traffic.bytes(ranks)
    assert named in str(error.value)
    assert f"communication(fn, ranks=[{ranks}])" in str(error.value)


@given(counts=st.lists(st.integers(1, 99), min_size=1, max_size=3), meet=st.booleans())
def test_parts_of_a_world_wait_for_their_own_ranks(counts, meet):
    """An update takes as long as that part of it which has most to send, and what all do."""
    link, size = Link(latency=2.0, bandwidth=0.5), 2 * len(counts)

    def all_meet(world: af.World) -> None:
        if meet:
            all_reduce(world, 3)

    def program(world: af.World) -> None:
        all_meet(world)
        all_reduce(world.split(size=2), counts[world.rank // 2])

    def alone(world: af.World) -> None:
        all_reduce(world, max(counts))

    def seconds(fn: Any, ranks: int) -> float:
        return communication(fn, ranks=[ranks]).seconds(link, ranks=ranks)

    expected = seconds(alone, 2) + seconds(all_meet, size)
    assert seconds(program, size) == pytest.approx(expected)
