# SPDX-License-Identifier: Apache-2.0
"""Test the structure of the package: its folders, their sizes, imports, and roles of ranks."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from accelfn import plug
from tests import house
from tests.style.bounds import SATELLITES, tracked

_PUBLIC_MODULES = (
    *("errors", "testing", "testing.strategies", "schedules", "orders", "track"),
    *("typing", "plug"),
)


def test_the_hall_is_small():
    """The package root has seven files, and folders."""
    files = {path.name for path in house.PACKAGE.glob("*.py")}
    assert files == {
        *("__init__.py", "__main__.py", "cli.py", "errors.py", "orders.py"),
        *("plug.py", "typing.py"),
    }


@pytest.mark.parametrize("folder", house.folders(), ids=house.name_of)
def test_a_room_says_in_one_sentence_what_lives_there(folder):
    """The docstring of each folder's `__init__` begins with a sentence on one line."""
    sentence = house.sentence_of(folder)
    assert re.fullmatch(r"[A-Z`][^.]{20,}(\.[^\s.]+[^.]*)*\.", sentence), sentence
    assert len(sentence) < 100


def test_the_page_on_design_is_the_house():
    """Its picture and its table are those of the code; `python -m tests.house` writes them."""
    text = house.PAGE.read_text(encoding="utf-8")
    assert text == house.page(text)
    for folder in house.folders():
        assert text.count(f"| `{house.name_of(folder)}` |") == 1


def test_the_picture_follows_the_contract():
    """Every arrow of the picture goes down by the layers of the import contract."""
    floor = {room: i for i, layer in enumerate(house.layers()) for room in layer}
    drawn = re.findall(r"^    (\w+) --> (.+)$", house.picture(), re.MULTILINE)
    assert {room for room, _ in drawn} == floor.keys() - {"errors"}
    assert all(
        floor[room] < floor[other]
        for room, others in drawn
        for other in others.split(" & ")
    )


def test_importing_the_package_loads_no_satellite():
    """The public names that satellites give are there when they are asked for."""
    says = "import sys, accelfn; print(*{m.split('.')[1] for m in sys.modules if 'accelfn.' in m})"
    found = subprocess.run(
        [sys.executable, "-c", says], capture_output=True, text=True, check=True
    )
    assert not {*found.stdout.split()} & {*SATELLITES}


def test_plug_has_few_names_each_with_its_sentence():
    """What satellites use of the kernel is at most 41 names, each under a comment."""
    text = Path(plug.__file__).read_text(encoding="utf-8")
    imports = r"^    # (.*)\n    from \S+ import (\w+) as \2$"
    sentences = {name: said for said, name in re.findall(imports, text, re.MULTILINE)}
    assert len(sentences) == text.count("\n    from ") <= 41
    assert {*dir(plug)} >= {*sentences}
    assert all(getattr(plug, name) is not None for name in sentences)
    for sentence in sentences.values():
        assert re.fullmatch(r"[A-Z][^.]{20,}\.", sentence), sentence


def test_testing_needs_few_names_beyond_plug() -> None:
    """Its laws look into transforms, updates and simulated connections; the number may fall."""
    public = re.compile(r"accelfn(\.(errors|orders|plug|schedules|testing)\b.*)?")
    found = {
        (node.module, each.name)
        for path in (house.PACKAGE / "testing").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom)
        and (node.module or "").startswith("accelfn")
        if not public.fullmatch(node.module or "")
        for each in node.names
    }
    assert len(found) <= 23, sorted(found)


def test_the_kernel_imports_no_public_table():
    """A folder of the kernel takes a name from where it is, so layers are what they seem."""
    satellites = {*SATELLITES, "plug"}
    found = [
        path
        for path in house.PACKAGE.rglob("*/*.py")
        if path.relative_to(house.PACKAGE).parts[0] not in satellites
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and node.module == "accelfn"
        if not all((house.PACKAGE / each.name).is_dir() for each in node.names)
    ]
    assert not found


def test_tests_import_private_names_from_one_module():
    """A move of code in the package changes `tests/internals.py` and no other test."""
    public = {"accelfn", *(f"accelfn.{each}" for each in _PUBLIC_MODULES)}
    found = [
        f"{path}: {name}"
        for path in tracked("tests")
        if Path("tests", "bench") not in path.parents
        for node in ast.walk(ast.parse((house.PACKAGE.parent / path).read_text()))
        for name in _modules_of(node)
        if name.partition(".")[0] == "accelfn" and name not in public
    ]
    assert not found


def _modules_of(node: ast.AST) -> list[str]:
    if isinstance(node, ast.ImportFrom):
        return [node.module or ""]
    return [each.name for each in node.names] if isinstance(node, ast.Import) else []


BELOW = ("world", "collectives", "checkpoint", "launching", "testing")
"""Folders that may read `world.rank`: they create worlds, or work on all ranks of a world."""


GIVEN = {
    "loop/control.py": "prints, logs, waits and runs on the ranks that the caller names",
    "loop/profiling.py": "a file for each rank of the caller's world",
    "loop/memory.py": "the ranks of the caller's world find one batch size together",
    "loop/evaluate.py": "gives parts to the ranks that the caller names",
    "data/consistency.py": "all ranks that take samples hold the same data",
    "data/loaders.py": "errors name the rank of the state's world",
    "state/state.py": "compares what the ranks of the caller's world hold",
    "engine/runner.py": "an order of calls is that of one group of ranks",
    "track/throughput.py": "counts the devices of the state's world",
    "engine/doctor.py": "all ranks of the state's world build an engine together",
}
"""Files that may read `world.rank`, each with the reason."""


WORDS = ("rank", "size", "group")


def asked(path: Path) -> list[int]:
    """Return the lines in which a world is asked as it is."""
    lines: list[int] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and node.attr in WORDS:
            owner = node.value
            name = getattr(owner, "id", None) or getattr(owner, "attr", None)
            if name in ("world", "_world"):
                lines.append(node.lineno)
    return lines


def test_a_world_is_asked_by_role():
    """`world.batch`, `world.loss` or an axis; the world as it is only where that is meant."""
    found = {
        path.relative_to(house.PACKAGE).as_posix()
        for path in house.PACKAGE.rglob("*.py")
        if path.relative_to(house.PACKAGE).parts[0] not in BELOW and asked(path)
    }
    assert found == GIVEN.keys()
