# SPDX-License-Identifier: Apache-2.0
"""The fake accelerator's streams: who does not wait for another is seen, and who does is not."""

from contextlib import nullcontext
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


def module() -> Any:
    return torch.get_device_module(DEVICE)


ACTS = {"reads": lambda tensor: tensor + 1, "writes": lambda tensor: tensor.add_(1)}


def wait_by_a_third(one: Any, other: Any, _: Any) -> None:
    third = module().Stream()
    third.wait_stream(one)
    other.wait_stream(third)


ORDERS = {
    "the other stream waits": lambda one, other, _: other.wait_stream(one),
    "for an event": lambda one, other, _: record(one).wait(other),
    "by a third stream": wait_by_a_third,
    "the host waits": lambda one, *_: one.synchronize(),
    "the host waits for an event": lambda one, *_: record(one).synchronize(),
    "nothing": lambda *_: None,
    "the first stream waits": lambda one, other, _: one.wait_stream(other),
    "the host waits for the other stream": lambda _, other, __: other.synchronize(),
    "for an event of before": lambda _, other, before: before.wait(other),
}
"""What happens between acts of two streams; the last four put neither before the other."""


def record(stream: Any) -> Any:
    event = module().Event()
    event.record(stream)
    return event


@pytest.mark.parametrize("first", ACTS)
@pytest.mark.parametrize("second", ACTS)
@pytest.mark.parametrize("order", ORDERS)
def test_a_race_is_what_nothing_orders(order, first, second):
    """Two streams of which one writes race, unless the second waits for the first."""
    made = torch.zeros(3, device=DEVICE)
    one, other = (module().Stream() for _ in range(2))
    module().synchronize()
    before = record(one)
    with module().stream(one):
        ACTS[first](made)
    ORDERS[order](one, other, before)
    is_race = order in list(ORDERS)[-4:] and "writes" in (first, second)
    raced = pytest.raises(AssertionError) if is_race else nullcontext()
    with raced, module().stream(other):
        ACTS[second](made)


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


def test_what_is_copied_has_arrived_when_the_host_has_waited():
    """Before that a copy to the host has no numbers, and of another stream it has none still."""
    there, some = torch.ones(2, device=DEVICE), [module().Stream() for _ in range(2)]
    module().synchronize()
    hosts = [torch.zeros(2) for _ in some]
    for stream, host in zip(some, hosts, strict=True):
        with module().stream(stream):
            host.copy_(there, non_blocking=True)
    assert not any(host.tolist() == [1, 1] for host in hosts)
    some[0].synchronize()
    assert [host.tolist() == [1, 1] for host in hosts] == [True, False]
    some[1].synchronize()


@pytest.mark.parametrize("is_first", [True, False])
def test_the_host_does_not_write_over_what_is_being_copied(is_first):
    """Before its copy to the device has ended; afterwards it may."""
    side, home = module().Stream(), torch.zeros(2)
    with module().stream(side):
        torch.empty(2, device=DEVICE).copy_(home, non_blocking=True)
    if is_first:
        home.fill_(1.0)
        with pytest.raises(AssertionError, match="the host wrote over"):
            side.synchronize()
    else:
        side.synchronize()
        home.fill_(1.0)
        side.synchronize()
