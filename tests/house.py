# SPDX-License-Identifier: Apache-2.0
"""Two tables about the package's folders: what each contains, and which folders it imports.

`python -m tests.house` writes the tables into docs/design.md.
"""

import ast
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "accelfn"
PAGE = ROOT / "docs" / "design.md"
_PART = r"(<!-- {name} -->\n).*?(<!-- end of {name} -->)"


def folders() -> list[Path]:
    """Return every folder of the package, sorted."""
    return sorted(path.parent for path in PACKAGE.rglob("*/__init__.py"))


def name_of(folder: Path) -> str:
    """Return a folder as the documents name it."""
    return f"{folder.relative_to(PACKAGE).as_posix()}/"


def sentence_of(folder: Path) -> str:
    """Return what a folder says of itself: the first paragraph of its docstring."""
    tree = ast.parse((folder / "__init__.py").read_text(encoding="utf-8"))
    return (ast.get_docstring(tree) or "").split("\n\n")[0].replace("\n", " ")


def layers() -> list[list[str]]:
    """Return the import contract: the rooms and files of each layer, the top one first."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = settings["tool"]["importlinter"]["contracts"]
    (contract,) = (each for each in contracts if each["type"] == "layers")
    return [layer.split(" | ") for layer in contract["layers"]]


def _imported(path: Path) -> Iterator[str]:
    """Yield the rooms from which a file imports."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.ImportFrom(module="accelfn"):
                yield from (each.name for each in node.names)
            case ast.ImportFrom(module=str(module)) if module.startswith("accelfn."):
                yield module.split(".")[1]


@cache
def arrows() -> dict[str, frozenset[str]]:
    """Return of each room those that it imports from."""
    rooms = {room for layer in layers() for room in layer}
    found: dict[str, set[str]] = {room: set() for room in rooms}
    for path in PACKAGE.rglob("*.py"):
        room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if room in rooms:
            found[room] |= (rooms & {*_imported(path)}) - {room}
    return {room: frozenset(others) for room, others in found.items()}


def _below(room: str) -> frozenset[str]:
    """Return all that a room leans on, by way of others too."""
    direct = arrows()[room]
    return direct.union(*map(_below, direct))


def picture() -> str:
    """Return the rooms as a Mermaid diagram; an arrow that others imply is left out."""
    lines = ["```mermaid", "flowchart TD"]
    for layer in layers():
        for room in layer:
            implied = frozenset[str]().union(*map(_below, arrows()[room]))
            shown = sorted(arrows()[room] - implied)
            if shown:
                lines.append(f"    {room} --> {' & '.join(shown)}")
    return "\n".join([*lines, "```", ""])


def table() -> str:
    """Return what lives in each folder, as a Markdown table."""
    rows = [f"| `{name_of(each)}` | {sentence_of(each)} |" for each in folders()]
    return "\n".join(["| folder | contents |", "| --- | --- |", *rows, ""])


def page(text: str) -> str:
    """Return a page with the picture and the table as they are now."""
    for name, part in (("picture", picture()), ("rooms", table())):
        pattern = re.compile(_PART.format(name=name), re.DOTALL)
        text, found = pattern.subn(lambda m, part=part: m[1] + part + m[2], text)
        assert found == 1, f"{PAGE} has no place for the {name}"
    return text


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
