# SPDX-License-Identifier: Apache-2.0
"""The programs that are compared run, and agree where they should."""

import importlib.util
from pathlib import Path

import pytest

from tests.budget import at_night

HERE = Path(__file__).parent
SPEC = importlib.util.spec_from_file_location("compare", HERE / "compare.py")
compare = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(compare)

HERE_TOO = [
    name
    for name, package in {
        "by hand": "torch",
        "Accelerate": "accelerate",
        "Fabric": "lightning_fabric",
        "accelfn": "accelfn",
    }.items()
    if importlib.util.find_spec(package)
]


@pytest.mark.slow
def test_on_one_process_all_train_alike():
    """By hand, with Accelerate, Fabric and accelfn, the losses of all updates are the same."""
    names = HERE_TOO if at_night() else ["by hand", "accelfn"]
    expected, *others = (compare.trained(compare.PROGRAMS[name], 1) for name in names)
    assert expected["samples"] == [*[100] * 16, 97] * 2
    for found in others:
        assert found["samples"] == expected["samples"]
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-5)
        assert found["held_out"] == pytest.approx(expected["held_out"], rel=1e-5)


@pytest.mark.skipif(not at_night(), reason="starts two processes four times: at night")
@pytest.mark.parametrize("name", HERE_TOO)
def test_on_two_processes_accelfn_trains_as_on_one(name):
    """accelfn takes the updates of one process; the others take samples twice, up to 1 %."""
    one = compare.trained(compare.PROGRAMS["by hand"], 1)
    two = compare.trained(compare.PROGRAMS[name], 2)
    assert two["losses"][0] == pytest.approx(one["losses"][0], rel=1e-5)
    assert two["losses"] == pytest.approx(one["losses"], rel=1e-2)
    if name == "accelfn":
        assert two["samples"] == one["samples"]
        assert two["losses"] == pytest.approx(one["losses"], rel=1e-5)
        assert two["held_out"] == pytest.approx(one["held_out"], rel=1e-5)


def test_the_front_page_has_the_table_of_today():
    """README's table has these programs, with the lines that they have."""
    page = compare.README.read_text()
    begin, end = compare.MARKS
    assert page.count(begin) == page.count(end) == 1
    table = page.partition(begin)[2].partition(end)[0]
    lines = [str(compare.lines_of(each)) for each in compare.PROGRAMS.values()]
    assert "| " + " | ".join(["", *compare.PROGRAMS]) + " |" in table
    assert "| " + " | ".join(["lines", *lines]) + " |" in table
