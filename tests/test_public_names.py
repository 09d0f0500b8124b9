# SPDX-License-Identifier: Apache-2.0
"""Test that the public names are complete, sorted, documented, and each in only one place."""

import ast
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import accelfn as af
from accelfn import testing
from tests.waiting import HANGS

ROOT = Path(__file__).parents[1]
REFERENCE = ROOT / "docs/reference"
HEADING = re.compile(r"^## `af\.((?:errors\.|typing\.)?\w+)`$", re.MULTILINE)

OF_TESTING = {
    *("DeadlockError", "DefaultGroupError", "LawError"),
    *("RankCrashedError", "SimulationError"),
}
"""Errors that only `accelfn.testing` raises; its page has them."""

TREE = ast.parse((ROOT / "accelfn/__init__.py").read_text())


def is_class_of(owner: ModuleType, name: str, module: str) -> bool:
    """Return whether a name is a class of such a module, and not one of `accelfn.testing`."""
    value = getattr(owner, name)
    is_ours = inspect.isclass(value) and value.__module__.startswith(module)
    return is_ours and not hasattr(testing, name)


def is_public_error(name: str) -> bool:
    return is_class_of(af.errors, name, "accelfn.errors")


def exports(body: list[ast.stmt]) -> list[tuple[str | None, str, str | None]]:
    """Return what these statements import for others: module, name and alias."""
    return [
        (node.module, alias.name, alias.asname)
        for node in body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if not (alias.asname or alias.name).startswith("_")
    ]


AT_ONCE = exports(TREE.body)
LATER = [
    each
    for node in TREE.body
    if isinstance(node, ast.If) and ast.unparse(node.test) == "_typing.TYPE_CHECKING"
    for each in exports(node.body)
]
EXPORTS = [*AT_ONCE, *LATER]
NAMES = [exported for _, _, exported in EXPORTS]
TABLES = {"errors", "typing"}  # their names have sections, they have none
DOCUMENTED = [
    *sorted(set(NAMES) - TABLES),
    *(f"errors.{name}" for name in dir(af.errors) if is_public_error(name)),
    *(f"typing.{name}" for name in dir(af.typing)),
]


def text_of(pages: str) -> str:
    return "\n".join(path.read_text() for path in sorted(REFERENCE.glob(pages)))


def cards(pages: str) -> list[str]:
    """Return the names that have a section of their own on these pages of the reference."""
    return HEADING.findall(text_of(pages))


def is_transform(name: str) -> bool:
    return is_class_of(af, name, "accelfn.transforms.")


def test_every_public_name_is_exported_on_purpose():
    """`accelfn` shows the names that it exports by alias, and its modules, no others."""
    shown = {name for name in dir(af) if not name.startswith("_")}
    modules = {name for name in shown if inspect.ismodule(getattr(af, name))}
    assert set(NAMES) == (shown - modules) | {
        *("errors", "megatron", "orders", "schedules", "track", "typing")
    }


def test_what_is_imported_later_is_what_type_checkers_see():
    """Names that are imported when first used come from the modules that are written down."""
    assert LATER
    assert {*dir(af)} >= {name for _, name, _ in LATER}
    slow = {"accelfn.checkpoint", "accelfn.engine.fsdp", "torch.distributed.tensor"}
    code = (
        "import sys, accelfn; accelfn.wrap_ddp, accelfn.wrap_fsdp;"
        f" sys.exit(bool({slow} & sys.modules.keys()))"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], check=False, timeout=HANGS
        ).returncode
        == 0
    )
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        getattr(af, "nothing")  # noqa: B009 - it is looked up


def order(export: tuple[str, str, str]) -> tuple[str, bool, str]:
    """Order by module, then classes before functions, as ruff does."""
    module, name, _ = export
    return module, name[0].islower(), name


def test_exports_are_sorted_and_read_as_public():
    """They stand in the order of their modules and names, each once, as `name as name`."""
    assert [original for _, original, _ in EXPORTS] == NAMES
    assert sorted(set(AT_ONCE), key=order) == AT_ONCE
    assert sorted(set(LATER), key=order) == LATER


@pytest.mark.parametrize("name", NAMES)
def test_a_public_name_has_one_address_and_a_docstring(name):
    """The name means one object, whose own module is a part of accelfn."""
    value = getattr(af, name)
    assert inspect.getdoc(value)
    if inspect.ismodule(value):
        rooms = "accelfn", "accelfn.data", "accelfn.engine.module"
        assert value.__name__ in [f"{room}.{name}" for room in rooms]
        return
    home = importlib.import_module(value.__module__)
    assert value is getattr(home, name)
    assert home.__name__.startswith("accelfn.")


def test_the_reference_documents_each_public_name_once():
    """One section, on one page, is the name's own; and no section is for anything else."""
    documented = [name for p in REFERENCE.glob("*.md") for name in cards(p.name)]
    assert sorted(documented) == sorted(DOCUMENTED)


def test_every_transform_has_its_card():
    """A transform is documented among the transforms, in the table too, by a whole card."""
    transforms = [name for name in NAMES if is_transform(name) and name[0].islower()]
    page, text = (REFERENCE / "transforms.md").read_text(), text_of("transforms*.md")
    assert {*transforms} <= {*cards("transforms*.md")}
    assert [name for name in transforms if f"[`{name}`]" not in page] == []
    sections = dict(
        re.findall(r"^## `af\.(\w+)`$(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    )
    for part in ("Does", "Acts on", "Law", "Cost", "When not"):
        for name in transforms:
            assert f"- **{part}**" in sections[name], (part, name)


def test_every_error_is_among_the_errors():
    """Each error class has its section, and each but the root its row."""
    errors = {name for name in DOCUMENTED if name.startswith("errors.")}
    page = (REFERENCE / "errors.md").read_text()
    assert errors == set(cards("errors*.md"))
    assert set() == {
        name
        for name in errors - {"errors.Error"}
        if f"[`{name.removeprefix('errors.')}`]" not in page
    }


def test_the_fields_of_a_transform_are_in_the_table():
    """The table of the reference lists the fields that the decorator accepts."""
    section = text_of("transforms-custom.md").split("## `af.transform`")[1]
    table = section.split("| fields | order |")[0]
    listed = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    with pytest.raises(af.errors.ArgumentError) as refused:

        @af.transform
        class Misspelt:
            def no_such_field(self): ...

    named = re.search(r"\((.*?)\)", str(refused.value))
    assert named is not None
    assert named.group(1).split(", ") == listed


def test_the_names_for_tests_are_exported_once_and_documented():
    """Each name of `accelfn.testing` is one object of accelfn's, on its page."""
    page = text_of("testing*.md")
    assert sorted(testing.__all__, key=lambda n: (n[0].islower(), n)) == testing.__all__
    for name in testing.__all__:
        value = getattr(testing, name)
        assert inspect.getdoc(value), name
        assert re.search(rf"`{name}\b", page), name
