# SPDX-License-Identifier: Apache-2.0
"""The fake accelerator's streams: who does not wait for another is seen, and who does is not."""

from itertools import count
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

import accelfn as af
from accelfn.testing import simulate
from tests.accelerator import fake, streams

DEVICE = f"{fake.NAME}:0"
HOME = torch.arange(3.0)
ACTS = st.one_of(
    st.tuples(st.just("write"), st.integers(0, 2), st.integers(0, 2)),
    st.tuples(st.just("read"), st.integers(0, 2), st.integers(0, 2)),
    st.tuples(st.just("wait"), st.integers(0, 2), st.integers(0, 2)),
    st.tuples(st.just("record"), st.integers(0, 2), st.just(0)),
    st.tuples(st.just("wait for event"), st.integers(0, 2), st.just(0)),
    st.tuples(st.just("host waits"), st.integers(0, 3), st.just(0)),
)


def module() -> Any:
    return torch.get_device_module(DEVICE)


class Work:
    """What streams are given, each after which others: plainly, as a graph."""

    def __init__(self) -> None:
        self.ends: list[set[int]] = [set() for _ in range(3)]
        self.event = set[int]()
        self.host = set[int]()
        self.wrote: list[int | None] = [None] * 3
        self.readers: list[set[int]] = [set() for _ in range(3)]
        self.numbers = count()

    def do(self, stream: int, at: int, *, write: bool) -> bool:
        """Give a stream something to do; return whether it may do it at once."""
        before = self.ends[stream] | self.host
        needed = {self.wrote[at]} - {None} | (self.readers[at] if write else set())
        number = next(self.numbers)
        self.ends[stream] = before | {number}
        if write:
            self.wrote[at], self.readers[at] = number, set()
        else:
            self.readers[at].add(number)
        return needed <= before


@given(acts=st.lists(ACTS, max_size=12))
def test_a_race_is_what_nothing_orders(acts: list[tuple[str, int, int]]) -> None:
    """Drawn reads, writes and waits of three streams, beside a graph of what comes after what."""
    made = [torch.zeros(3, device=DEVICE) for _ in range(3)]
    some = [module().Stream() for _ in range(3)]
    module().synchronize()
    event, work = module().Event(), Work()
    event.record(some[0])
    for what, one, other in acts:
        if what in ("write", "read"):
            is_ordered = work.do(one, other, write=what == "write")
            is_race = False
            try:
                with module().stream(some[one]):
                    made[other].add_(1) if what == "write" else made[other] + 1
            except AssertionError:
                is_race = True
            assert is_race is not is_ordered
            if is_race:
                return
        elif what == "wait":
            some[one].wait_stream(some[other])
            work.ends[one] |= work.ends[other]
        elif what == "record":
            event.record(some[one])
            work.event = {*work.ends[one]}
        elif what == "wait for event":
            event.wait(some[one])
            work.ends[one] |= work.event
        elif one < 3:
            some[one].synchronize()
            work.host |= work.ends[one]
        else:
            event.synchronize()
            work.host |= work.event


@given(
    delays=st.lists(
        st.tuples(*[st.integers(0, 2)] * 3),
        min_size=2,
        max_size=3,
    ),
    host_waits=st.booleans(),
)
def test_ranks_meet_from_streams_of_their_own(
    delays: list[tuple[int, ...]], *, host_waits: bool
) -> None:
    """Sums that each rank begins on its own stream, and waits for so many later than it begins."""

    def run(world: af.World) -> list[list[float]]:
        side, works = module().Stream(), dict[int, Any]()
        with module().stream(side):
            there = [torch.full((2,), world.rank + i).to(DEVICE) * 2 for i in range(3)]
            for now in range(5):
                if now < 3:
                    works[now] = dist.all_reduce(
                        there[now], group=world.group, async_op=True
                    )
                if host_waits:
                    side.synchronize()
                for i in [i for i in works if i + delays[world.rank][i] == now]:
                    works.pop(i).wait()
                    there[i] += 1
        module().current_stream().wait_stream(side)
        return [each.cpu().tolist() for each in there]

    size = len(delays)
    sums = [2 * sum(rank + i for rank in range(size)) + 1 for i in range(3)]
    try:
        found = simulate(size, run, device=DEVICE)
    except AssertionError as error:
        pytest.fail(str(error))
    assert list(found) == [[[each] * 2 for each in sums]] * size


def test_memory_that_is_let_go_under_a_copy_is_an_error():
    """Of whoever waits for the copy."""
    side = module().Stream(torch.device(DEVICE))
    target = torch.empty(3, device=DEVICE)
    side.wait_stream(module().current_stream())
    with module().stream(side):
        target.copy_(HOME, non_blocking=True)
    del target
    with pytest.raises(AssertionError, match="let go"):
        module().current_stream().wait_stream(side)
    assert streams.UNDER_WAY == []


COPIES = st.lists(
    st.tuples(
        st.sampled_from(["to the host", "from the host", "write", "host waits"]),
        st.integers(0, 3),
    ),
    max_size=12,
)


@given(acts=COPIES)
def test_what_is_copied_has_arrived_when_the_host_has_waited(
    acts: list[tuple[str, int]],
) -> None:
    """Copies on two streams for which nobody waits, what the host writes, and what it waits for."""
    module().synchronize()
    there, some = torch.ones(2, device=DEVICE), [module().Stream() for _ in range(2)]
    module().synchronize()
    coming: list[tuple[int, torch.Tensor]] = []
    going: list[tuple[int, torch.Tensor]] = []
    lost = set[int]()
    for what, number in acts:
        stream = some[number % 2]
        with module().stream(stream):
            if what == "to the host":
                host = torch.zeros(2).copy_(there, non_blocking=True)
                coming.append((number % 2, host))
            elif what == "from the host":
                going.append((number % 2, home := torch.zeros(2)))
                torch.empty(2, device=DEVICE).copy_(home, non_blocking=True)
        if what == "write" and number < len(going):
            going[number][1].fill_(1.0)
            lost.add(going[number][0])
        if what == "host waits":
            if number % 2 in lost:
                with pytest.raises(AssertionError, match="the host wrote over"):
                    stream.synchronize()
                break
            stream.synchronize()
            assert all(h.tolist() == [1, 1] for i, h in coming if i == number % 2)
            coming = [each for each in coming if each[0] != number % 2]
            going = [each for each in going if each[0] != number % 2]
        assert not any(host.tolist() == [1, 1] for _, host in coming)
    for _, home in going:
        home.zero_()
