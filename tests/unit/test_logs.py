# SPDX-License-Identifier: Apache-2.0
"""A logger for ranks: who writes, in which order, and what a record says."""

import logging

import pytest

import accelfn as af
from accelfn.testing import simulate

SCHEDULES = [(), (2, 1, 0, 1), (0, 0, 2)]


@pytest.fixture
def records(caplog):
    caplog.set_level(logging.INFO, logger="train")
    return caplog


def said(caplog):
    found = [each for each in caplog.records if each.name == "train"]
    return [(each.rank, each.world_size, each.getMessage()) for each in found]


def test_one_rank_writes(records):
    """The others format nothing, and levels are those of the standard logger."""
    told = []

    class Told:
        def __init__(self, rank):
            self.rank = rank

        def __str__(self):
            told.append(self.rank)
            return f"by {self.rank}"

    def fn(world):
        log = af.logger("train", world)
        log.info("told %s", Told(world.rank))
        log.debug("told %s", Told(world.rank))

    simulate(3, fn)
    assert said(records) == [(0, 3, "told by 0")]
    assert set(told) == {0}


def test_a_record_has_its_extra_and_its_place(records):
    """What is given as extra= is there beside rank and world_size, and the line of the program."""
    log = af.logger("train", af.World.single())
    log.info("told", extra={"run": 7, "rank": 9})
    (record,) = [each for each in records.records if each.name == "train"]
    assert (record.run, record.rank, record.world_size) == (7, 0, 1)
    place = "test_logs.py", "test_a_record_has_its_extra_and_its_place"
    assert (record.filename, record.funcName) == place


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_some_ranks_write(records, schedule):
    """Then each text begins with its rank."""

    def fn(world):
        log = af.logger("train", world, ranks=(1, 2))
        af.barrier(world)
        log.warning("100%% of %d", world.rank, extra={"rank": 9, "mine": 1})
        assert log.isEnabledFor(logging.INFO) == (world.rank > 0)

    simulate(3, fn, schedule=schedule)
    assert sorted(said(records)) == [
        (1, 3, "rank 1: 100% of 1"),
        (2, 3, "rank 2: 100% of 2"),
    ]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_ranks_are_heard_in_order(records, schedule):
    """Whoever comes first; the record has the rank that said it, and the place of the call."""

    def fn(world):
        log = af.logger("train", world)
        log.in_order(logging.WARNING, "%s%% done", 10 * world.rank)
        log.in_order(logging.DEBUG, "nothing")

    simulate(3, fn, schedule=schedule)
    assert said(records) == [
        (rank, 3, f"rank {rank}: {10 * rank}% done") for rank in range(3)
    ]
    assert {each.filename for each in records.records} == {"test_logs.py"}


@pytest.mark.parametrize(
    "said_by",
    [
        ("%(a)s of %(b)d", {"a": 1, "b": 2}),
        ("%s", {"a": 1}),
        ("%s", {}),
        ("%s and %s", {"a": 1}, 2),
        ("50%%",),
        ("50%% of %s", "all"),
        ({"no": "text"},),
    ],
)
def test_texts_are_the_standard_loggers(records, said_by):
    """In order too, a message and its arguments make the text that `logging` makes of them."""
    log = af.logger("train", af.World.single())
    log.info(*said_by)
    log.in_order(logging.INFO, *said_by)
    (_, _, plain), (_, _, ordered) = said(records)
    assert ordered == f"rank 0: {plain}"


@pytest.mark.parametrize("ranks", [(), (2,), (-1, 0), ("0",), 1, "0", [True], [0.0]])
def test_ranks_that_are_none(ranks):
    """They are refused where the logger is made."""
    with pytest.raises(af.errors.ArgumentError, match=r"logger\(ranks=.*from 0 to 1"):
        simulate(2, lambda world: af.logger("train", world, ranks=ranks))
