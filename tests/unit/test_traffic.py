# SPDX-License-Identifier: Apache-2.0
"""Traffic as a table and as a chart, on the command line too, and what is refused."""

import re
import sys
from functools import partial

import attrs
import pytest
import torch
from torch import nn

import accelfn as af
from accelfn.testing import Link, communication, simulate
from tests.internals import main

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


# `accelfn traffic`


NEIGHBOUR = """
import torch

import accelfn as af


def averages(world):
    af.all_reduce(torch.zeros(1000), world, "mean", label="an average")
"""
SCRIPT = """
from dataclasses import dataclass

from neighbour import averages


@dataclass
class Twice:
    times: int = 2

    def __call__(self, world):
        for _ in range(self.times):
            averages(world)


twice, number = Twice(), 3
if __name__ == "__main__":
    raise SystemExit("the script was run")
"""


def averages(world):
    """Do what the script's function does."""
    af.all_reduce(torch.zeros(1000), world, "mean", label="an average")


@pytest.fixture
def script(tmp_path, monkeypatch):
    """Return a script that imports what lies beside it."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "neighbour.py").write_text(NEIGHBOUR)
    monkeypatch.delitem(sys.modules, "neighbour", raising=False)
    file = tmp_path / "train.py"
    file.write_text(SCRIPT)
    return str(file)


def test_it_prints_what_is_foreseen(script, capsys):
    words = [f"{script}:averages", f"{script}:twice", "--ranks", "2,64"]
    assert main(["traffic", *words, "--link", "8,5"]) == 0
    said = capsys.readouterr().out
    sent = communication(averages).bytes(64)["an average"]
    assert f"{sent:,}" in said
    assert f"{2 * sent:,}" in said
    assert "seconds per update" in said


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["nowhere.py:train"], "nowhere.py does not exist"),
        (["no_such_module:train"], "no module 'no_such_module'"),
        (["SCRIPT"], "is not a program"),
        (["SCRIPT:nothing"], "has no function 'nothing'"),
        (["SCRIPT:number"], "has no function 'number'"),
        (["SCRIPT:averages", "SCRIPT:averages"], "is named twice"),
        (["SCRIPT:averages", "--ranks", "2,many"], "--ranks '2,many'"),
        (["SCRIPT:averages", "--ranks", "0"], "--ranks '0'"),
        (["SCRIPT:averages", "--link", "8"], "--link '8'"),
        (["SCRIPT:averages", "--link", "0,1"], "bandwidth"),
    ],
)
def test_a_mistake_is_a_sentence(words, told, script, capsys):
    assert main(["traffic", *(word.replace("SCRIPT", script) for word in words)]) == 2
    err = capsys.readouterr().err
    assert told in err
    assert err.startswith("accelfn traffic: ")


def test_a_link_is_one_of_tcp_in_its_own_units(script, capsys):
    """Megabits, milliseconds and what TCP adds to a byte, for the seconds of each size."""
    assert (
        main(["traffic", f"{script}:averages", "--ranks", "2,8", "--link", "8,5"]) == 0
    )
    link = Link(latency=0.005, bandwidth=1_000_000, overhead=0.068)
    table = communication(averages).table([2, 8], link=link)
    bare = communication(averages).table([2, 8], link=attrs.evolve(link, overhead=0.0))
    said = capsys.readouterr().out
    assert said.partition("\n")[2].strip() == table.strip()
    assert table != bare


def test_an_error_of_the_program_is_its_own(tmp_path, monkeypatch, capsys):
    """A module that lacks another is there: what it lacks is named, not the module."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    (tmp_path / "lacks_one.py").write_text("import no_such_neighbour\n")
    with pytest.raises(ModuleNotFoundError, match="no_such_neighbour"):
        main(["traffic", "lacks_one:train"])
    (tmp_path / "whole_one.py").touch()
    assert main(["traffic", "whole_one.inner:train"]) == 2
    assert "no module 'whole_one.inner'" in capsys.readouterr().err
