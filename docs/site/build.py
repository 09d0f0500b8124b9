# SPDX-License-Identifier: Apache-2.0
"""Build the site: `python docs/site/build.py [FOLDER]`, by default into build/site.

The site has the pages of docs/, with these changes:

- Files of the repository that a page links to, such as tests, become pages.
- Python sessions are marked, so that copying leaves out the prompts.
- Named code blocks in a row become tabs. So does a diff.
- The reference gets signatures and tables of arguments.
- The foot of a page says when CI ran its Python code.

Publish FOLDER/site. Each version has its own folder there, and readers can switch between the
versions that were built into the same FOLDER.
"""

import json
import re
import shutil
import subprocess
import sys
import textwrap
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import reference
import tomlkit
from finish import finish, fold_sections
from last_run import foot
from packaging.version import Version

DOCS = Path(__file__).parents[1]
ROOT = DOCS.parent
CONFIG = DOCS / "site/zensical.toml"
ELSEWHERE = {
    ROOT / "examples/README.md": "examples/index.md",
    ROOT / "examples/21_notebook.ipynb": "examples/21_notebook.md",
    ROOT / "CHANGELOG.md": "changes.md",
    ROOT / "tests/laws/README.md": "law-tests.md",
}
"""Pages outside docs/, and their places on the site."""
PICTURES = {".svg", ".png"}
OUT_OF_SEARCH = "---\nsearch:\n  exclude: true\n---\n"
"""Begins a page that the search leaves out."""
LISTS = {"benchmarks.md", "changes.md", "law-tests.md"}
"""Long lists, which contain every word. The search leaves them out."""
TO_NEWEST = '<!doctype html><meta http-equiv="refresh" content="0; url={}/">\n'
"""Redirects from the address of all versions to the newest version."""
PARTS = re.compile(r"^(```.*?^```$)", re.MULTILINE | re.DOTALL)
HEADED_BLOCKS = re.compile(
    r"(?:^\*\*[^*\n]+\*\*\n\n```\w*\n(?:(?!```).*\n)*```\n\n?){2,}", re.MULTILINE
)
"""Code blocks that follow each other, each below its name in bold. They become tabs."""
DIFF = re.compile(r"^```diff\n((?:(?!```).*\n)*)```\n", re.MULTILINE)
"""The change of a script that leaves Accelerate."""
LINK = re.compile(r"(\[[^\]]*\])\(([^)\s#]+)(#[^)\s]*)?\)")


@cache
def sources() -> dict[Path, str]:
    """Return the place on the site of every page in Markdown."""
    pages = {page: page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}
    return {**pages, **ELSEWHERE}


def build(folder: Path) -> Path:
    """Build this version of the site, and return the folder of all versions."""
    version, versions = package()["version"], folder / "site"
    pages = folder / "docs"
    for old in pages, versions / version:
        shutil.rmtree(old, ignore_errors=True)
    for path in DOCS.rglob("*.*"):
        if path.suffix in {*PICTURES, ".css"}:
            kept = path.relative_to(DOCS / "site" if path.suffix == ".css" else DOCS)
            _write(pages / kept, path.read_bytes())
    linked: set[Path] = set()
    for source, place in sources().items():
        _write(pages / place, _page(source, place, linked))
    for path in sorted(linked):
        _write(pages / _place(path), _show_file(path))
    _write(folder / "zensical.toml", _config())
    command = "-m", "zensical", "build", "--strict", "--clean"
    result = subprocess.run(  # noqa: S603 - the generator
        [sys.executable, *command],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    output = result.stdout + result.stderr
    if result.returncode or "arning" in output:
        msg = f"Zensical warns about {pages}:\n{output}"
        raise SystemExit(msg)
    for page in (versions / version).rglob("*.html"):
        html = finish(page.read_text())
        is_folded = page.parent.name == "benchmarks"
        page.write_text(fold_sections(html) if is_folded else html)
    _list_versions(versions)
    return versions


def _list_versions(versions: Path) -> None:
    """Write the list of versions, newest first, and a redirect to the newest."""
    there = (each.name for each in versions.iterdir() if each.is_dir())
    newest, *older = sorted(there, key=Version, reverse=True)
    listed = [
        {
            "version": each,
            "title": each,
            "aliases": ["latest"] if each == newest else [],
        }
        for each in (newest, *older)
    ]
    _write(versions / "versions.json", json.dumps(listed))
    _write(versions / "index.html", TO_NEWEST.format(newest))


def _config() -> str:
    """Return the configuration, with the version and addresses of the package."""
    config = tomllib.loads(CONFIG.read_text())
    version = package()["version"]
    config["project"]["copyright"] = f"accelfn {version}, Apache-2.0"
    config["project"]["site_dir"] = f"site/{version}"
    if url := address("documentation"):
        config["project"]["site_url"] = f"{url.rstrip('/')}/{version}/"
    return tomlkit.dumps(config)


@cache
def package() -> dict[str, Any]:
    """Return the metadata of the package in pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def address(what: str) -> str | None:
    """Return an address of the project, or None."""
    known = {key.lower(): url for key, url in package().get("urls", {}).items()}
    return known.get(what)


def _page(source: Path, place: str, linked: set[Path]) -> str:
    """Return a page for the site, and add the files that it links to to `linked`."""
    up = "../" * place.count("/")

    def rewrite_link(found: re.Match[str]) -> str:
        text, link, anchor = found[1], found[2], found[3] or ""
        if "://" in link:
            return found[0]
        target = (source.parent / link).resolve()
        if target not in sources() and target.suffix not in PICTURES:
            linked.add(target)
        return f"{text}({up}{_place(target)}{anchor})"

    text = "".join(
        _block(part) if part.startswith("```") else LINK.sub(rewrite_link, part)
        for part in PARTS.split(_text(source))
    )
    text = HEADED_BLOCKS.sub(_tabs, DIFF.sub(_tabs_of_diff, text))
    if source.parent == reference.REFERENCE:
        text = reference.add_signatures(text)
    if url := address("source"):
        text += f"\n[Edit this page]({url}/edit/main/{source.relative_to(ROOT)})\n"
    text += foot(text, package()["version"])
    return OUT_OF_SEARCH + text if place in LISTS else text


def _tabs(blocks: re.Match[str]) -> str:
    """Return named code blocks as tabs."""
    named = re.findall(r"^\*\*(.+)\*\*\n\n((?:(?!\*\*).*\n)*)", blocks[0], re.MULTILINE)
    return "".join(
        f'=== "{name}"\n\n{textwrap.indent(block.strip(), " " * 4)}\n\n'
        for name, block in named
    )


def _tabs_of_diff(diff: re.Match[str]) -> str:
    """Return a diff as tabs: the diff, and the script before and after it."""
    lines = diff[1].splitlines()
    before, after = (
        "\n".join(line[1:] for line in lines if not line.startswith(sign))
        for sign in "+-"
    )
    return (
        f"**Difference**\n\n{diff[0]}\n"
        f"**Accelerate**\n\n```py\n{before}\n```\n\n"
        f"**accelfn**\n\n```py\n{after}\n```\n"
    )


def _text(source: Path) -> str:
    """Return a page or a notebook as Markdown."""
    text = source.read_text()
    if source.suffix != ".ipynb":
        return text
    cells = [(cell, "".join(cell["source"])) for cell in json.loads(text)["cells"]]
    return "\n\n".join(
        f"```python\n{text}\n```" if cell["cell_type"] == "code" else text
        for cell, text in cells
    )


def _place(path: Path) -> str:
    """Return the place on the site of a file of the repository."""
    if path in sources():
        return sources()[path]
    if path.suffix in PICTURES:
        return path.relative_to(DOCS).as_posix()
    return f"{path.relative_to(ROOT).as_posix()}.md"


def _block(block: str) -> str:
    """Return a code block for the site.

    Diagrams stay text, because Mermaid's script would be loaded from another site.
    """
    if block.startswith("```python\n>>> "):
        return block.replace("```python", "```pycon", 1)
    return block.replace("```mermaid\nflowchart TD\n", "```text\n")


def _show_file(path: Path) -> str:
    """Return a page with the text of a file, or with the names in a folder."""
    name = path.relative_to(ROOT).as_posix()
    hidden = "" if name.startswith("examples/") else OUT_OF_SEARCH
    if path.is_dir():
        inside = sorted(each.name for each in path.iterdir() if each.suffix == ".py")
        return f"{hidden}# {name}\n\n" + "".join(f"- `{each}`\n" for each in inside)
    language = {".py": "python", ".toml": "toml"}.get(path.suffix, "text")
    fence = "`" * 8
    return f"{hidden}# {name}\n\n{fence}{language}\n{path.read_text()}\n{fence}\n"


def _write(path: Path, content: str | bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)


if __name__ == "__main__":
    print(build(Path(*sys.argv[1:] or [ROOT / "build/site"])))
