# SPDX-License-Identifier: Apache-2.0
"""Add signatures and tables of arguments to the pages of docs/reference.

A page documents a name under a heading such as "## `af.ema`". This module imports the name,
because `@af.transform` creates the signature of a transform, and reads its docstring.
"""

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from html import escape
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, NamedTuple

import accelfn as af
from accelfn import testing

REFERENCE = Path(__file__).parents[1] / "reference"
CREATED_BY_METHODS = af.TrainState, af.World
"""Classes without a public constructor; class methods create their instances."""
WIDTH = 84

_HEADING = re.compile(r"^## `(?:(af)\.)?([\w.]+)`$")
_FENCES = re.compile(r"^(```.*?^```$)", re.MULTILINE | re.DOTALL)
_TABLE = re.compile(
    r"^\| (?:argument|option) \|(?: default \|)? (?:meaning|records) \|\n(?:\|.*\n)+",
    re.MULTILINE,
)
_SECTION = re.compile(r"([A-Z][\w ]*):")
_ITEM = re.compile(r"([*\w]+(?:, [*\w]+)*): (.+)")
_MODULES = re.compile(r"\b(?:\w+\.)+(?=[A-Za-z_]\w*)")
_OPTIONAL = re.compile(r"Optional\[([^\[\]]*(?:\[[^\[\]]*\])?)\]")
_CODE = re.compile(r"(`[^`]*`)|([*_<\[\]|])")
_WORD = re.compile(r"[A-Za-z_]\w*")
_KEPT = {"torch.dtype", "torch.device"}
"""Types that keep the name of their module."""


class Entry(NamedTuple):
    """A documented name: how users write it, and its value."""

    path: str
    value: Any


def add_signatures(text: str) -> str:
    """Return a reference page with signatures and arguments below its headings."""
    parts = re.split(r"^(?=## )", text, flags=re.MULTILINE)
    return "".join(_section(part) for part in parts)


def _section(part: str) -> str:
    heading, _, body = part.partition("\n")
    entry = _entry(heading)
    if entry is None:
        return part
    path, value = entry
    inside = [Entry(f"{path}.{name}", member) for name, member in members(value)]
    body, merged = _merge_tables(body, [entry, *inside])
    blocks = [heading]
    if _is_called(value):
        blocks.append(_code(signature(path, value)))
    first, rest = _split_first_paragraph(body.strip())
    blocks.append(first or _summary(value))
    if path not in merged:
        blocks.append(_arguments(value))
    blocks += [rest, _raises(value)]
    for name, member in inside:
        blocks += [f"### `{name}`"]
        if callable(member):
            blocks.append(_code(signature(name, member)))
        above = " The table above lists the arguments." if name in merged else ""
        blocks.append(_summary(member) + above)
        if not above:
            blocks.append(_arguments(member))
        blocks.append(_raises(member))
    return "\n\n".join(block for block in blocks if block) + "\n\n"


def _entry(heading: str) -> Entry | None:
    """Return the public name that a heading documents, if there is one."""
    match = _HEADING.match(heading)
    if match is None:
        return None
    package, name = match.groups()
    if package:
        return Entry(f"af.{name}", attrgetter(name)(af))
    owner = name.partition(".")[0]
    if owner in testing.__all__:
        return Entry(name, getattr(testing, name))
    return Entry(name, attrgetter(name)(af)) if hasattr(af, owner) else None


def _split_first_paragraph(body: str) -> tuple[str, str]:
    """Return a section's first paragraph, if the section begins with one, and the rest."""
    first, _, rest = body.partition("\n\n")
    return (
        (first, rest)
        if re.match(r"[`\[\w]", first) and "```" not in first
        else ("", body)
    )


def _merge_tables(body: str, entries: list[Entry]) -> tuple[str, set[str]]:
    """Replace the tables of arguments that a page has, and return whose they are.

    The page's sentences take the place of the docstring's.
    """
    merged: set[str] = set()

    def merge(match: re.Match[str]) -> str:
        rows = [line.strip("| ").split(" | ") for line in match[0].splitlines()[2:]]
        sentences = {
            name: row[-1] for row in rows for name in re.findall(r"`\**(\w+)`", row[0])
        }
        for path, value in entries:
            known = parameters(value) if callable(value) else {}
            if path not in merged and sentences.keys() <= known.keys():
                merged.add(path)
                return f"{_arguments(value, sentences)}\n"
        return match[0]

    parts = _FENCES.split(body)
    return "".join(
        part if part.startswith("```") else _TABLE.sub(merge, part) for part in parts
    ), merged


def _is_called(value: Any) -> bool:
    is_exception = isinstance(value, type) and issubclass(value, Exception)
    return callable(value) and not is_exception and value not in CREATED_BY_METHODS


def members(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the documented members of a module or a class, without those of transforms."""
    if isinstance(value, ModuleType):
        for name in sorted(dir(value)):
            member = getattr(value, name)
            home = str(getattr(member, "__module__", ""))
            if (
                not name.startswith("_")
                and home.startswith(value.__name__)
                and inspect.getdoc(member)
            ):
                yield name, member
    elif isinstance(value, type) and not hasattr(value, "__accelfn_transform__"):
        methods = property | classmethod | staticmethod | Callable
        for name, member in vars(value).items():
            is_public = not name.startswith("_") and isinstance(member, methods)
            if is_public and inspect.getdoc(getattr(member, "__func__", member)):
                yield (
                    name,
                    member if isinstance(member, property) else getattr(value, name),
                )


def parameters(value: Any) -> dict[str, inspect.Parameter]:
    """Return the parameters that callers pass, by name."""
    try:
        known = dict(inspect.signature(value).parameters)
    except ValueError:
        return {}
    known.pop("self", None)
    return known


def signature(path: str, value: Any) -> str:
    """Return a call as code, with one argument per line if it is long."""
    known = list(parameters(value).values())
    shown = [_argument(parameter) for parameter in known]
    for i, parameter in enumerate(known):
        if parameter.kind is parameter.KEYWORD_ONLY:
            if not any(p.kind is p.VAR_POSITIONAL for p in known[:i]):
                shown.insert(i, "*")
            break
    result = inspect.signature(value).return_annotation
    gives = (
        "" if isinstance(value, type) or result is inspect.Signature.empty else result
    )
    arrow = f" -> {type_name(gives)}" if gives != "" else ""
    line = f"{path}({', '.join(shown)}){arrow}"
    if len(line) <= WIDTH:
        return line
    lines = "".join(f"    {argument},\n" for argument in shown)
    return f"{path}(\n{lines}){arrow}"


def _argument(parameter: inspect.Parameter) -> str:
    text = _starred(parameter)
    if parameter.annotation is not parameter.empty:
        text += f": {type_name(parameter.annotation)}"
    if parameter.default is parameter.empty:
        return text
    return f"{text}{' = ' if ':' in text else '='}{_default(parameter.default)}"


def _starred(parameter: inspect.Parameter) -> str:
    stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}
    return stars.get(parameter.kind, "") + parameter.name


def type_name(annotation: Any) -> str:
    """Return a type without the modules in its name."""
    text = inspect.formatannotation(annotation).strip("'")
    text = text.replace("NoneType", "None").replace("~", "").replace("'World", "World")
    text = _OPTIONAL.sub(r"\1 | None", text)
    text = re.sub(
        r"(?:\w+\.)+\w+",
        lambda m: m[0] if m[0] in _KEPT else m[0].rpartition(".")[2],
        text,
    )
    return re.sub(r"\bModule\b", "nn.Module", text)


def _default(value: Any) -> str:
    if inspect.isroutine(value) or isinstance(value, type):
        return str(getattr(value, "__name__", value))
    if isinstance(value, MappingProxyType):
        value = dict(value)
    text = repr(value)
    if " at 0x" in text or text == "NOTHING":
        return "..."
    return _MODULES.sub("", text) if text.startswith("accelfn") else text


def _arguments(value: Any, sentences: Mapping[str, str] | None = None) -> str:
    """Return a table of the arguments, or of an instance's attributes."""
    sections = dict(_sections(inspect.getdoc(value) or ""))
    items = _items(sections.get("Args") or sections.get("Attributes") or "")
    said = {name: _cell(text) for name, text in items.items()} | dict(sentences or {})
    if _is_called(value):
        rows = [
            (
                _starred(p),
                _linked_type(p.annotation),
                _default_cell(p),
                said.get(name, ""),
            )
            for name, p in parameters(value).items()
            if said.get(name) or name != "name"
        ]
        head = "argument", "type", "default", "meaning"
    else:
        rows = [(name, text) for name, text in said.items()]
        head = "attribute", "meaning"
    if not any(row[-1] for row in rows):
        return ""
    lines = [head, ["---"] * len(head), *((f"`{name}`", *rest) for name, *rest in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _default_cell(parameter: inspect.Parameter) -> str:
    if parameter.default is not parameter.empty:
        return f"`{_default(parameter.default)}`"
    is_variadic = parameter.kind in {parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD}
    return "" if is_variadic else "required"


def _linked_type(annotation: Any) -> str:
    """Return a type as HTML, in which documented names are links."""
    if annotation is inspect.Signature.empty:
        return ""

    def link(match: re.Match[str]) -> str:
        place = places().get(match[0])
        return f'<a href="{place}">{match[0]}</a>' if place else match[0]

    text = _WORD.sub(link, escape(type_name(annotation), quote=False))
    return f"<code>{text}</code>".replace("|", "&#124;")


@cache
def places() -> dict[str, str]:
    """Return where the site documents each name, relative to the folder of the reference."""
    found: dict[str, str] = {}
    for page in sorted(REFERENCE.glob("*.md")):
        for line in page.read_text().splitlines():
            if (match := _HEADING.match(line)) and (entry := _entry(line)):
                anchor = re.sub(r"[^\w]", "", f"{match[1] or ''}{match[2]}".lower())
                found[entry.path.rpartition(".")[2]] = f"{page.name}#{anchor}"
    return {name: place for name, place in found.items() if name[0].isupper()}


def _summary(value: Any) -> str:
    """Return the first sentence of a docstring."""
    return _text((inspect.getdoc(value) or "").partition("\n\n")[0].replace("\n", " "))


def _raises(value: Any) -> str:
    """Return the errors that a call raises, folded until a reader opens them."""
    items = _items(dict(_sections(inspect.getdoc(value) or "")).get("Raises", ""))
    if not items or not callable(value):
        return ""
    lines = "".join(
        f"<li><code>{_linked_name(name)}</code>: {_html(text)}</li>"
        for name, text in items.items()
    )
    return (
        f'<details class="raises"><summary>Raises</summary><ul>{lines}</ul></details>'
    )


def _linked_name(names: str) -> str:
    return _WORD.sub(
        lambda m: (
            f'<a href="{places()[m[0]]}">{m[0]}</a>' if m[0] in places() else m[0]
        ),
        names,
    )


def _html(text: str) -> str:
    return re.sub(r"`([^`]*)`", r"<code>\1</code>", escape(text, quote=False))


def _sections(doc: str) -> Iterator[tuple[str, str]]:
    """Yield the titled sections of a docstring, such as Args and Raises."""
    title, lines = "", []
    for line in [*doc.splitlines(), "End:"]:
        if match := _SECTION.fullmatch(line):
            yield title, inspect.cleandoc("\n".join(lines)) if lines else ""
            title, lines = match[1], []
        elif line and not line.startswith(" "):
            if title:
                yield title, inspect.cleandoc("\n".join(lines)) if lines else ""
            title, lines = "", []
        else:
            lines.append(line)


def _items(section: str) -> dict[str, str]:
    """Return the items `name: text` of a section; several names may share a text."""
    items: list[list[str]] = []
    for line in section.splitlines():
        if match := _ITEM.fullmatch(line):
            items.append([match[1], match[2]])
        elif items and line:
            items[-1].append(line.strip())
    return {
        name.lstrip("*"): " ".join(texts)
        for names, *texts in items
        for name in ([names] if names[0].isupper() else names.split(", "))
    }


def _text(text: str) -> str:
    """Return prose in which only code between backticks is marked up."""
    return _CODE.sub(lambda match: match[1] or f"\\{match[2]}", text)


def _cell(text: str) -> str:
    """Return prose for a cell of a table."""
    return re.sub(r"(?<!\\)\|", r"\\|", _text(text))


def _code(text: str) -> str:
    return f"```python\n{text}\n```"
