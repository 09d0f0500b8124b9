# SPDX-License-Identifier: Apache-2.0
"""Find hard phrases in pages, docstrings, comments and error messages.

`python -m tests.style.prose PATH...` lists the phrases, each with a plainer phrase.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_RULES = {
    r"\b(?:of|in|at|by|over|on|under|from|to|with|through) (?:which|whom|whose)\b": (
        "start a second sentence with the noun"
    ),
    r"(?:^|[.:;] )What (?!(?:is|are)\b[^.]*\?|does\b|do\b)(?=[a-z])": "name the thing",
    r"\b(?:is|are|was|were) (?:told|said|given away)\b": "name the actor",
    r"\bin (?:the )?place of\b": "instead of",
    r"\b[Bb]eside\b": "with, next to, in addition to",
    r"\b(?:seldom|as ever|whoever|whomever|likewise|wherever)\b": "a plain word",
    r"\b(?:is|are) no (?!longer|need|way|more\b)[a-z]+": "is not a",
    r"\b(?:is|are|has|have) none\b": "repeat the noun",
    r"\b(?:stands?|stood|lies|lie) (?:in|where|behind|beside|for|under|among|with)\b": "is",
    r", say[.,:;]|, too[.;:]": "for example, also",
    r"\bin silence\b|\bwithout a word\b": "silently, without a warning",
    r"\b(?:goes|go|went) on\b": "continue",
    r"\basks? for\b": "needs",
    r"\bof (?:one's|your|its|their) own\b": "your own",
    r"\b[Hh]owever (?:many|few|unevenly|often|they|it|the)\b": "no matter how",
}
RULES = {re.compile(rule, re.MULTILINE): advice for rule, advice in _RULES.items()}
BARE = re.compile(
    r"(?:Those|These|This|That|Others?|One|Each|Both|None)"
    r" (?:is|are|was|were|has|have|had|does|do|can|may|must|goes|gives|takes|of|that|which)\b"
)
LONGEST = 30
"""The maximum number of words in a sentence."""


class Finding(NamedTuple):
    """A hard phrase, its line, and advice what to write instead."""

    line: int
    phrase: str
    advice: str


def findings(path: Path) -> list[Finding]:
    """Return the hard phrases of a Markdown page or a Python file."""
    texts = _texts_of_page if path.suffix == ".md" else _texts_of_source
    return [
        each for line, text in texts(path.read_text()) for each in _in_text(line, text)
    ]


def _in_text(line: int, text: str) -> Iterator[Finding]:
    for rule, advice in RULES.items():
        for match in rule.finditer(text):
            yield Finding(line, match[0].strip(), advice)
    for sentence in re.split(r"(?<=[.:;]) ", text):
        if len(sentence.split()) > LONGEST:
            yield Finding(line, f"{sentence[:40]}...", "split the sentence")
        if BARE.match(sentence):
            yield Finding(line, sentence[:40], "repeat the noun")


def _texts_of_page(page: str) -> Iterator[tuple[int, str]]:
    """Yield the line and text of each paragraph, list item and table cell, without code."""
    is_code, paragraph, first = False, list[str](), 1
    for number, line in enumerate([*page.split("\n"), ""], 1):
        fences = re.match(r"\s*(```|~~~)", line)
        is_code ^= bool(fences)
        plain = re.sub(
            r"`[^`]*`", "CODE", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", line)
        )
        is_item = re.match(r"\s*(?:[-*]|\d+\.) ", line)
        is_text = line.strip() and not line.lstrip().startswith(
            ("#", "<!--", "![", "|")
        )
        if paragraph and (is_code or fences or is_item or not is_text):
            yield first, " ".join(paragraph)
            paragraph = []
        if is_code or fences:
            continue
        if line.lstrip().startswith("|"):
            yield from ((number, cell.strip()) for cell in plain.strip("| ").split("|"))
        elif is_text:
            first = first if paragraph else number
            paragraph.append(re.sub(r"^\s*(?:[-*]|\d+\.) ", "", plain).strip())


def _texts_of_source(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and text of docstring paragraphs, error messages and comments."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(
            node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module)
        ):
            docstring = ast.get_docstring(node) or ""
            for paragraph in re.split(r"\n\s*\n|\n\s{4,}(?=\w+: )", docstring):
                words = " ".join(re.sub(r"`[^`]*`", "CODE", paragraph).split())
                yield getattr(node, "lineno", 1), words
        else:
            yield from ((node.lineno, text) for text in map(_literal, _said(node)))
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and len(token.string.split()) > 3:
            yield token.start[0], token.string.lstrip("# ")


def _said(node: ast.AST) -> list[ast.expr]:
    """Return the messages to users in a statement or call."""
    if isinstance(node, ast.Call):
        name = getattr(node.func, "id", getattr(node.func, "attr", ""))
        return node.args if name in ("warn", "advise") or name.endswith("Error") else []
    targets = node.targets if isinstance(node, ast.Assign) else []
    return [node.value for each in targets if getattr(each, "id", "") == "msg"]


def _literal(node: ast.expr) -> str:
    if isinstance(node, ast.JoinedStr):
        parts = node.values
        return "".join(
            _literal(p) if isinstance(p, ast.Constant) else "X" for p in parts
        )
    value = node.value if isinstance(node, ast.Constant) else ""
    return value if isinstance(value, str) and len(value.split()) > 3 else ""


if __name__ == "__main__":
    for root in map(Path, sys.argv[1:]):
        for path in sorted(root.rglob("*.*")) if root.is_dir() else [root]:
            for found in findings(path) if path.suffix in (".md", ".py") else ():
                sys.stdout.write(
                    f"{path}:{found.line}: {found.phrase!r}: {found.advice}\n"
                )
