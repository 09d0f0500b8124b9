# SPDX-License-Identifier: Apache-2.0
"""The methods that the how-to builds keep the laws of transforms."""

import re
from pathlib import Path
from typing import Any

import pytest

from accelfn.testing import check_transform
from tests.budget import at_night

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "methods-of-your-own.md"


@pytest.mark.skipif(not at_night(), reason="half a minute: nox -s laws")
def test_they_keep_the_laws() -> None:
    """Each of them, as the page says; the first one by day, on the page itself."""
    found: dict[str, Any] = {}
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    for block in blocks:
        if not block.startswith(">>>"):
            exec(block, found)  # noqa: S102 - the page's own
    check_transform(found["demo"](top=2))
    check_transform(found["pairs"](sync_every=2))
