# SPDX-License-Identifier: Apache-2.0
"""A plugin of pytest that plants a bug for a whole run, or notes which tests enter functions.

`python -m tests.mutants --random` and `--file` start such runs; see `search`.
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
"""Variable: the bug to plant, as JSON of its place and its change."""
PLACES = "ACCELFN_PLACES"
"""Variable: the places to watch, as JSON, and the directory to write what entered them to."""
_entered: dict[str, dict[str, None]] = {}


def pytest_configure() -> None:
    """Give functions their changed code, in this process and so in what it forks."""
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
    """Write what was noted."""
    if PLACES in os.environ:
        path = Path(json.loads(os.environ[PLACES])[1], f"{os.getpid()}.json")
        path.write_text(json.dumps({place: [*t] for place, t in _entered.items()}))


def plant(
    function: FunctionType, changed: ast.FunctionDef | ast.AsyncFunctionDef
) -> None:
    """Give a function the code of a changed syntax tree."""
    function.__code__ = compile_function(function, changed)


def note(place: str) -> None:
    """Note that the test that runs now has entered a function."""
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
    test = re.sub(r"@[^@\]]*$", "", test)  # its group, if tests run side by side
    if test:
        _entered.setdefault(place, {})[test] = None
