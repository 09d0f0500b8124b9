# SPDX-License-Identifier: Apache-2.0
"""Test that the documentation's pictures show what the code does, and have text versions."""

import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from tests.waiting import HANGS

ROOT = Path(__file__).parents[1]
PICTURES = sorted(ROOT.glob("docs/pictures/*.svg"))
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """Return a folder of pictures that were drawn now."""
    folder = tmp_path_factory.mktemp("pictures")
    command = sys.executable, "docs/pictures/draw.py", str(folder)
    subprocess.run(command, cwd=ROOT, check=True, timeout=HANGS)
    return folder


def test_every_picture_is_drawn(drawn):
    """None is there that no script draws."""
    assert {path.name for path in PICTURES} == {path.name for path in drawn.iterdir()}


@pytest.mark.parametrize("path", PICTURES, ids=lambda path: path.stem)
def test_a_picture_is_up_to_date(drawn, path):
    """Drawn anew it is the same; `python docs/pictures/draw.py` writes them all."""
    assert path.read_text() == (drawn / path.name).read_text()


@pytest.mark.parametrize("path", PICTURES, ids=lambda path: path.stem)
def test_a_picture_is_told_in_words(path):
    """It has a title and a description, and pages that show it say its title."""
    title, words = ET.parse(path).getroot()[:2]  # noqa: S314
    shown = [
        said
        for page in PAGES
        for said, link in re.findall(r"!\[([^\]]*)\]\(([^)]+)\)", page.read_text())
        if (page.parent / link).resolve() == path
    ]
    assert shown
    assert set(shown) == {title.text}
    assert len(words.text) > 100
