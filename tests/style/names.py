# SPDX-License-Identifier: Apache-2.0
"""Find names that are only a participle, adverb or pronoun, such as `told` or `given`.

`python -m tests.style.names FILE...` lists such names.
"""

import ast
import re
import sys
from pathlib import Path

_WORDS = (
    "told said found given taken held kept made met begun done left gone known shown drawn cut"
    " put lent laid apart alike there here own mine each whole beside around ahead together"
    " written seen sent unread unheard unwritten bound lost bare near way ways others both which"
    " what whose strange wanted"
)
_BARE = re.compile(rf"_?(?:[a-z]+ed|{'|'.join(_WORDS.split())})")
_NOUN_WORDS = "_seed seed need speed feed embed shed bed red led named shared"
_NOUNS = set(_NOUN_WORDS.split())


def bare_functions(path: Path) -> list[str]:
    """Return the names of a file's functions that are only a participle or the like."""
    kinds = ast.FunctionDef, ast.AsyncFunctionDef
    nodes = ast.walk(ast.parse(path.read_text()))
    return [
        each.name for each in nodes if isinstance(each, kinds) and _is_bare(each.name)
    ]


def bare_variables(path: Path) -> list[str]:
    """Return such names of a file's variables and parameters, once for each assignment."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    stored = [
        each.id
        for each in nodes
        if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)
    ]
    arguments = [each.arg for each in nodes if isinstance(each, ast.arg)]
    return [name for name in [*stored, *arguments] if _is_bare(name)]


def _is_bare(name: str) -> bool:
    return bool(_BARE.fullmatch(name)) and name not in _NOUNS


if __name__ == "__main__":
    for each in map(Path, sys.argv[1:]):
        for name in (*bare_functions(each), *bare_variables(each)):
            sys.stdout.write(f"{each}: {name}\n")
