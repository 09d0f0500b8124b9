# SPDX-License-Identifier: Apache-2.0
"""Pages of signatures and docstrings, one beside each page of the reference.

Names are looked at, not read in the source: a transform's signature is made by `@af.transform`.
"""

import inspect
import re
from collections.abc import Callable, Iterator
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any

import accelfn as af
from accelfn import testing

REFERENCE = Path(__file__).parents[1] / "reference"
CARD = re.compile(r"^## `af\.((?:errors\.|typing\.)?\w+)`$", re.MULTILINE)
LISTS = "Args", "Attributes", "Raises", "Returns", "Yields"
MADE_BY_METHODS = af.TrainState, af.World
"""Classes that users never call; their constructors are among their methods."""
WIDTH = 84

_SECTION = re.compile(r"([A-Z][\w ]*):")
_ITEM = re.compile(r"([*\w]+(?:, [*\w]+)*): (.+)")
_HOME = re.compile(r"\b(?:collections\.abc|typing|pathlib|types|accelfn(?:\.\w+)*)\.")
_SPOKEN = re.compile(r"(`[^`]*`)|([*_<\[\]|])")


def pages() -> dict[str, str]:
    """Return each page as Markdown, by its name."""
    groups = {path.stem: CARD.findall(path.read_text()) for path in _cards()}
    home = {name: page for page, names in groups.items() for name in names}
    made = {
        page: _page(page, "af", {name: attrgetter(name)(af) for name in names}, home)
        for page, names in groups.items()
        if names
    }
    tests = {name: getattr(testing, name) for name in testing.__all__}
    return {**made, "testing": _page("testing", "testing", tests, home)}


def _cards() -> list[Path]:
    return sorted(REFERENCE.glob("*.md"))


def _page(page: str, prefix: str, names: dict[str, Any], home: dict[str, str]) -> str:
    title = (REFERENCE / f"{page}.md").read_text().partition("\n")[0].lstrip("# ")
    parts = [f"# {title}: signatures"]
    whole = f"[{title}](../reference/{page}.md)"
    parts.append(f"What each name says of itself. {whole} has examples beside it.")
    for name, value in names.items():
        parts += _entry(f"{prefix}.{name}", value, "##", home)
    return "\n\n".join(parts) + "\n"


def _entry(path: str, value: Any, level: str, home: dict[str, str]) -> Iterator[str]:
    """Yield a name's heading, signature, docstring and members."""
    yield f"{level} `{path}`"
    if _is_called(value):
        yield f"```python\n{signature(path, value)}\n```"
    yield from spoken(inspect.getdoc(value) or "", home)
    deeper = f"{level}#"
    for name, member in members(value):
        yield from _entry(f"{path}.{name}", member, deeper, home)


def _is_called(value: Any) -> bool:
    refused = isinstance(value, type) and issubclass(value, Exception)
    return callable(value) and not refused and value not in MADE_BY_METHODS


def members(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what a reader looks up in a module or a class: what is its own, and documented.

    A transform is called by accelfn alone, so what it has is not among them.
    """
    if isinstance(value, ModuleType):
        for name in sorted(dir(value)):
            each = getattr(value, name)
            inside = str(getattr(each, "__module__", "")).startswith(value.__name__)
            if not name.startswith("_") and inside and inspect.getdoc(each):
                yield name, each
    elif isinstance(value, type) and not hasattr(value, "__accelfn_transform__"):
        methods = property | classmethod | staticmethod | Callable
        for name, each in vars(value).items():
            public = not name.startswith("_") and isinstance(each, methods)
            if public and inspect.getdoc(getattr(each, "__func__", each)):
                yield name, each if isinstance(each, property) else getattr(value, name)


def signature(path: str, value: Any) -> str:
    """Return a call as code, an argument a line where one line is too long."""
    found = inspect.signature(value)
    given = list(found.parameters.values())
    if given and given[0].name == "self":
        given = given[1:]
    shown = [_argument(each) for each in given]
    for i, each in enumerate(given):
        if each.kind is each.KEYWORD_ONLY:
            if not any(e.kind is e.VAR_POSITIONAL for e in given[:i]):
                shown.insert(i, "*")
            break
    gives = "" if isinstance(value, type) else _type(found.return_annotation, " -> ")
    line = f"{path}({', '.join(shown)}){gives}"
    if len(line) <= WIDTH:
        return line
    lines = "".join(f"    {each},\n" for each in shown)
    return f"{path}(\n{lines}){gives}"


def _argument(each: inspect.Parameter) -> str:
    stars = {each.VAR_POSITIONAL: "*", each.VAR_KEYWORD: "**"}.get(each.kind, "")
    told = f"{stars}{each.name}{_type(each.annotation, ': ')}"
    if each.default is each.empty:
        return told
    equals = " = " if ":" in told else "="
    return f"{told}{equals}{_default(each.default)}"


def _type(annotation: Any, before: str) -> str:
    if annotation is inspect.Signature.empty:
        return ""
    text = inspect.formatannotation(annotation).strip("'")
    return before + _HOME.sub("", text).replace("NoneType", "None").replace("~", "")


def _default(value: Any) -> str:
    if inspect.isroutine(value) or isinstance(value, type):
        return str(getattr(value, "__name__", value))
    text = repr(value)
    made = " at 0x" in text or text == "NOTHING"
    return "..." if made else _HOME.sub("", text)


def spoken(doc: str, home: dict[str, str]) -> Iterator[str]:
    """Yield a docstring as Markdown: its paragraphs, its lists and its examples."""
    for block in _blocks(doc):
        first, _, rest = block.partition("\n")
        section = _SECTION.fullmatch(first)
        if section and rest:
            yield from _section(section[1], inspect.cleandoc(rest), home)
        elif block.startswith(">>> "):
            yield f"```pycon\n{block}\n```"
        elif first.startswith("Acts on: "):
            yield f"**Acts on**: {_text(block.removeprefix('Acts on: '))}"
        elif "\n    " in block:
            yield "```python\n" + block + "\n```"
        else:
            yield _text(block)


def _blocks(doc: str) -> Iterator[str]:
    """Yield what blank lines part; a section with all that is indented below it."""
    block: list[str] = []
    for line in doc.splitlines():
        section = bool(block) and bool(_SECTION.fullmatch(block[0]))
        parted = not line if not section else line and not line.startswith(" ")
        if block and (parted or _SECTION.fullmatch(line)):
            yield "\n".join(block).strip()
            block = []
        if block or line:
            block.append(line)
    if block:
        yield "\n".join(block).strip()


def _section(title: str, text: str, home: dict[str, str]) -> Iterator[str]:
    if title.startswith("Example"):
        yield f"**{title}**"
        yield f"```pycon\n{text}\n```"
        return
    items: list[list[str]] = []
    for line in text.splitlines():
        if (found := _ITEM.fullmatch(line)) and title not in {"Law", "Cost"}:
            items.append([found[1], found[2]])
        elif items:
            items[-1].append(line.strip())
    if items:
        yield f"**{title}**"
        yield "\n".join(
            f"- {_name(name, home)}: {_text(' '.join(said))}" for name, *said in items
        )
    else:
        yield f"**{title}**: {_text(text)}"


def _name(name: str, home: dict[str, str]) -> str:
    if name in home:
        return f"[`{name}`]({home[name]}.md#af{name.lower()})"
    return ", ".join(f"`{each}`" for each in name.split(", "))


def _text(text: str) -> str:
    """Return prose in which nothing but code between backticks is marked."""
    return _SPOKEN.sub(lambda m: m[1] or f"\\{m[2]}", text)
