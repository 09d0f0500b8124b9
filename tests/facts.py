# SPDX-License-Identifier: Apache-2.0
"""Tables for the reference: what accelfn's transforms do, and the facts that they declare.

`python -m tests.facts` writes the tables into docs/reference/. What a transform does is in its
docstring. Its facts are those of the first example in its catalog entry.
"""

import inspect
import re
from pathlib import Path
from typing import Any

import accelfn as af
from tests.internals import FACTS, chain, facts_of

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "transforms-custom.md"
DEEPSPEED = PAGE.with_name("deepspeed.md")
SUMMARY = PAGE.with_name("transforms.md")
_PART = re.compile(r"(<!-- facts -->\n).*?(<!-- end of facts -->)", flags=re.DOTALL)
_CARD = re.compile(r"^## `af\.(\w+)`\n(.*?)(?=^## |\Z)", flags=re.MULTILINE | re.DOTALL)
VARIANTS: tuple[Any, ...] = (
    af.wrap_ddp(),
    af.wrap_ddp(bucket_cap_mb=0.5),
    af.wrap_ddp(static_graph=True),
    af.wrap_ddp(within="dp_shard"),
    af.wrap_fsdp(),
    af.wrap_fsdp(find_unused_parameters=True),
    af.wrap_fsdp(cpu_offload=True),
    af.autocast("bf16"),
    af.autocast("fp16"),
    af.autocast("fp8"),
    af.compress_grads("fp16"),
    af.compress_grads("powersgd"),
    af.diloco(sync_every=500),
    af.diloco(sync_every=500, bits=8),
    af.compile(),
    af.compile(fullgraph=False),
    af.compile(backend="eager"),
)
"""Transforms with options that change what they say; they replace the example of the card."""


def shown(text: str) -> list[Any]:
    """Return the transforms of a page's tables."""
    names = {each.__name__ for each in public()}
    transforms: list[Any] = []
    for name, card in _CARD.findall(text):
        if name in names:
            kind = getattr(af, name)
            variants = [each for each in VARIANTS if type(each) is kind]
            code = card.partition(f">>> af.{name}(")[2].partition("\n")[0]
            transforms += variants or [eval(f"af.{name}({code}", {"af": af})]  # noqa: S307
    return transforms


def facts_table() -> str:
    """Return the meaning of each fact."""
    rows = [f"| `{fact}` | {meaning} |" for fact, meaning in FACTS.items()]
    return "\n".join(["| fact | meaning |", "| --- | --- |", *rows, "", ""])


def transforms_table(transforms: list[Any]) -> str:
    """Return what each transform says."""
    rows = ["| transform | tells | refuses | needs |", "| --- | --- | --- | --- |"]
    for each in transforms:
        said = [
            facts_of(each),
            getattr(each, "refuses", {}),
            getattr(each, "needs", {}),
        ]
        names = [", ".join(f"`{n}`" for n in sorted(part)) for part in said]
        rows.append(f"| `{each!r}` | {' | '.join(names)} |")
    return "\n".join(rows) + "\n"


def summary_table() -> str:
    """Return what each transform does: the first paragraph and "Acts on" of its docstring."""
    rows = ["| transform | what it does | acts on |", "| --- | --- | --- |"]
    pages = {
        name: path.name
        for path in (DEEPSPEED, *PAGE.parent.glob("transforms*.md"))
        for name, _ in _CARD.findall(path.read_text())
    }
    for each in sorted(public(), key=lambda each: each.__name__):
        name, text = each.__name__, inspect.getdoc(each) or ""
        parts = [part.replace("\n", " ") for part in text.split("\n\n")]
        (acts,) = (part[9:-1] for part in parts if part.startswith("Acts on: "))
        link = f"[`{name}`]({pages[name]}#af{name})"
        rows.append(f"| {link} | {parts[0].removesuffix('.')} | {acts} |")
    return "\n".join(rows) + "\n"


def cards() -> str:
    """Return the text of all pages about transforms."""
    return "".join(map(Path.read_text, sorted(PAGE.parent.glob("transforms*.md"))))


def page(path: Path) -> str:
    """Return a page with the tables as they are now."""
    text = path.read_text(encoding="utf-8")
    if path == SUMMARY:
        tables = summary_table()
    else:
        tables = facts_table() if path == PAGE else ""
        tables += transforms_table(shown(cards() if path == PAGE else text))
    return _PART.sub(lambda found: f"{found[1]}{tables}{found[2]}", text)


def public() -> set[type]:
    """Return the classes of accelfn's public transforms."""
    found = (getattr(af, name) for name in dir(af))
    return {
        each
        for each in found
        if isinstance(each, type)
        and getattr(each, "__accelfn_transform__", False)
        and each is not chain
    }


if __name__ == "__main__":
    for path in (PAGE, DEEPSPEED, SUMMARY):
        is_new = path.read_text(encoding="utf-8") != page(path)
        path.write_text(page(path), encoding="utf-8")
        print(f"{path}: {'changed' if is_new else 'as it was'}")  # noqa: T201
