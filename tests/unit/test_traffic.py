# SPDX-License-Identifier: Apache-2.0
"""Traffic as a table and as a chart, and what is refused."""

import re
from functools import partial

import pytest
import torch
from torch import nn

import accelfn as af
from accelfn.testing import Link, communication, simulate

LINK = Link(latency=0.001, bandwidth=125_000, overhead=0.068)


def program(world: af.World, setup: object = None) -> None:
    """Train a model of 5 parameters for two updates."""
    state = af.TrainState.create(
        model=lambda: nn.Linear(4, 1),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        setup=setup or af.wrap_ddp(),
        world=world,
    )
    step = af.make_step(lambda model, rows: model(rows).square().mean())
    for _ in range(2):
        state, _ = step(state, torch.ones(3, 4))


def nothing(world: af.World) -> None:
    """Send nothing at all."""


def of_group(world: af.World) -> None:
    """Sum a number with no label."""
    torch.distributed.all_reduce(torch.ones(3), group=world.group)


def test_a_table_has_a_row_a_label_and_a_column_a_world():
    """It has bytes of an update, their sum, a rank's share of it, and seconds."""
    traffic = communication(program)
    assert traffic.updates == 2
    assert traffic.table([1, 2, 8], link=LINK).splitlines() == [
        "bytes per update                  1 rank  2 ranks  8 ranks",
        "DistributedDataParallel backward       0       48      336",
        "all                                    0       48      336",
        "per rank                               0       24       42",
        "seconds per update                     0  0.00221   0.0144",
    ]
    assert str(traffic) == traffic.table([2, 3, 5])
    assert "all" in str(communication(nothing))


def test_what_has_no_label_says_so():
    """A call that nobody named is counted, and is all of one update of a plain program."""
    traffic = communication(of_group)
    assert traffic.updates == 0
    assert traffic.bytes(4) == {None: 72}
    assert traffic.start(4) == {}
    assert str(traffic).splitlines()[1].split() == ["no", "label", "24", "48", "96"]


def test_parts_that_do_not_divide_evenly_have_a_decimal():
    """12 bytes on the wire are 4.0 of each of 3 ranks; an uneven share is told as it is."""

    def one_byte(world: af.World) -> None:
        af.all_reduce(torch.zeros(1, dtype=torch.uint8), world, "sum", label="a byte")

    assert "1.3" in communication(one_byte).table([3])


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Link(latency=-1, bandwidth=1), "latency=-1"),
        (lambda: Link(latency=0, bandwidth=0), "above 0"),
        (lambda: Link(latency=0, bandwidth=float("nan")), "bandwidth=nan"),
        (lambda: Link(latency=0, bandwidth=1, overhead=-0.1), "overhead=-0.1"),
        (lambda: Link(latency=True, bandwidth=1), "latency=True"),
        (lambda: communication(nothing, ranks=[1, 2]), "each 2 or more"),
        (lambda: communication(nothing, ranks=[]), "each 2 or more"),
        (lambda: simulate(2, nothing).sent(by="rank"), "by='rank'"),
        (lambda: simulate(2, nothing).sent(algorithm="star"), "'ring', 'tree', 'gloo'"),
    ],
)
def test_what_is_no_link_is_refused(make, says):
    """With what was given, and what was expected."""
    with pytest.raises(af.errors.ArgumentError, match=re.escape(says)):
        make()


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda t: t.bytes(0), "1 or more, got 0"),
        (lambda t: t.bytes(2, algorithm="star"), "'ring', 'tree', 'gloo'"),
        (lambda t: t.seconds(LINK, ranks=2, compute=-1), "compute=-1"),
        (lambda t: t.seconds(LINK, ranks=2, overlap=2), "from 0 to 1"),
    ],
)
def test_what_traffic_cannot_tell_is_refused(call, says):
    """With what was given, and what was expected."""
    with pytest.raises(af.errors.ArgumentError, match=re.escape(says)):
        call(communication(nothing))


def test_other_numbers_of_updates_are_refused():
    """A program that takes fewer updates on more ranks has no bytes an update."""

    def fewer(world: af.World) -> None:
        for _ in range(6 // world.size):
            program(world)

    with pytest.raises(af.errors.ArgumentError, match="6 on 2 ranks, 4 on 3 ranks, 2"):
        communication(fewer)


def test_a_simulated_link_is_not_measured():
    """Ranks that take turns have no link, nor has one alone."""
    with pytest.raises(af.errors.WorldError, match="simulated ranks has no network"):
        simulate(2, Link.measured)
    with pytest.raises(af.errors.WorldError, match="one rank has no network link"):
        Link.measured(af.World.single(device="cpu"))
