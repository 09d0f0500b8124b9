# SPDX-License-Identifier: Apache-2.0
"""The pages that port Accelerate's tutorials name what Accelerate and accelfn have."""

import inspect
import re
from pathlib import Path

import pytest
from accelerate import Accelerator

import accelfn as af

PAGES = sorted((Path(__file__).parents[2] / "docs/how-to").glob("accelerate-*.md"))
CLASS = PAGES[0].with_name("accelerate-class.md").read_text()
ROW = re.compile(r"^\| (.*?) \| .* \|$", re.MULTILINE)
HAVE = {"af": af, "world": af.World, "state": af.TrainState}


ARGUMENTS, MEMBERS = CLASS.split("## Processes and devices")


def first_column(text):
    """Return the names in the first columns of the tables of a page's part."""
    return set(re.findall(r"`(\w+)`", " ".join(ROW.findall(text))))


def test_every_name_of_the_class_has_a_row():
    """Attributes and methods of Accelerate's class, as installed, and no name that it lacks."""
    names = {name for name in dir(Accelerator) if not name.startswith("_")}
    assert first_column(MEMBERS) == names


def test_every_argument_of_the_class_has_a_row():
    """Those of its constructor, as installed, and no other."""
    assert first_column(ARGUMENTS) == set(inspect.signature(Accelerator).parameters)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_port_names_what_there_is(page):
    """Each `af.name`, `world.name` and `state.name` of a page is one of accelfn's."""
    found = set(re.findall(r"\b(af|world|state)\.(?!md\b)(\w+)", page.read_text()))
    assert len(found) >= 5
    missing = {
        f"{owner}.{name}" for owner, name in found if not hasattr(HAVE[owner], name)
    }
    assert missing == set()
