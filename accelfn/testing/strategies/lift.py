# SPDX-License-Identifier: Apache-2.0
"""Fields that are given: a value stands for itself, a strategy is drawn from."""

from collections.abc import Mapping
from typing import Any

from hypothesis import strategies as st

Drawn = Mapping[str, st.SearchStrategy[Any]]


def lifted(given: Mapping[str, Any], drawn: Drawn) -> dict[str, st.SearchStrategy[Any]]:
    """Return a strategy for every field, the given ones first."""
    constant = {name: _strategy(value) for name, value in given.items()}
    return {**drawn, **constant}


def _strategy(value: Any) -> st.SearchStrategy[Any]:
    return value if isinstance(value, st.SearchStrategy) else st.just(value)
