# SPDX-License-Identifier: Apache-2.0
"""What may stand in a manifest: what a save writes passes, and anything else is refused."""

import json
from typing import Any

import pytest

from tests.golden import make as golden
from tests.internals import MAX_DEPTH, manifest


def plain(**changes: Any) -> dict[str, Any]:
    """Return what a manifest of a save says, but for its digest, with changes."""
    text = (golden.FOLDER / "one-rank" / "manifest.json").read_text()
    return {"copies": [], "definition": None, **json.loads(text), **changes}


def check(said: dict[str, Any]) -> None:
    manifest.check_structure(said)


def nested(kind: str, depth: int) -> Any:
    found: Any = 1
    for _ in range(depth):
        found = [found] if kind == "list" else {"inside": found}
    return found


@pytest.mark.parametrize("kind", ["list", "dict"])
@pytest.mark.parametrize("room", [0, 1, 2])
def test_facts_of_data_are_plain_and_not_too_deep(kind, room):
    """Lists and tables in one another, as many as anything that is saved may lie in."""
    check(plain(data={"fact": nested(kind, MAX_DEPTH - room), "other": None}))
    deep = nested(kind, MAX_DEPTH + 1 + room)
    with pytest.raises(ValueError, match=r"^data\.fact.* expected fewer nested levels"):
        check(plain(data={"other": 1, "fact": deep}))


@pytest.mark.parametrize("key", [1.5, None, True, ["a"]])
def test_keys_are_text_or_whole_numbers(key):
    """Of a table that has other keys than text, which JSON has not."""
    trees = plain()["trees"]
    for good in ("a", 3, -3):
        pairs = {"pairs": [[0, 1], [good, 2]]}
        check(plain(trees={**trees, "slots.mine": pairs}))
        bad = {"pairs": [*pairs["pairs"], [key, 3]]}
        said = r"^trees\.slots\.mine.* expected a string or an integer"
        with pytest.raises(ValueError, match=said):
            check(plain(trees={**trees, "slots.mine": bad}))
