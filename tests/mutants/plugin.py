# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin that inserts a bug for a whole run, or records which tests call functions.

`python -m tests.mutants --random` and `--file` start pytest with this plugin; see `search`.
"""

import ast
import json
import os
import re
from pathlib import Path
from types import FunctionType

from tests.mutants.change import change_function, plain
from tests.mutants.mutant import compile_function
from tests.mutants.places import find_place

BUG = "ACCELFN_BUG"
"""Environment variable: the bug to insert, as JSON of its place and its change."""
PLACES = "ACCELFN_PLACES"
"""Environment variable, as JSON: the functions to watch, and the directory for the records."""
_entered: dict[str, dict[str, None]] = {}


def pytest_configure() -> None:
    """Replace the code of functions, in this process and so in its forked processes."""
    if BUG in os.environ:
        place, change = json.loads(os.environ[BUG])
        found = find_place(place)
        plant(found.function, change_function(found.node, change))
    if PLACES in os.environ:
        for place in json.loads(os.environ[PLACES])[0]:
            found = find_place(place)
            node = plain(found.node)
            call = f"__import__('sys').modules[{__name__!r}].note({place!r})"
            node.body.insert(0, ast.parse(call).body[0])
            plant(found.function, node)


def pytest_sessionfinish() -> None:
    """Write the record of tests by function to a file."""
    if PLACES in os.environ:
        path = Path(json.loads(os.environ[PLACES])[1], f"{os.getpid()}.json")
        path.write_text(json.dumps({place: [*t] for place, t in _entered.items()}))


def plant(
    function: FunctionType, changed: ast.FunctionDef | ast.AsyncFunctionDef
) -> None:
    """Replace a function's code by that of a changed syntax tree."""
    function.__code__ = compile_function(function, changed)


def note(place: str) -> None:
    """Record that the current test has called a function."""
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
    test = re.sub(r"@[^@\]]*$", "", test)  # remove the group that xdist appends
    if test:
        _entered.setdefault(place, {})[test] = None
