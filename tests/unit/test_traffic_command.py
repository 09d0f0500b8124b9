# SPDX-License-Identifier: Apache-2.0
"""`accelfn traffic`: tables and a chart of what functions of a file send."""

import sys

import attrs
import pytest
import torch

import accelfn as af
from accelfn.testing import Link, communication
from tests.internals import main

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
