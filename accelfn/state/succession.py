# SPDX-License-Identifier: Apache-2.0
"""The state after another: made by the step, which can do without a look at the call."""

import inspect
from collections.abc import Callable
from typing import Any

import attrs

from accelfn.state.state import TrainState

fill: Callable[..., None] = inspect.unwrap(TrainState.__init__)
"""Set a new state's fields."""
_FIELDS = tuple((each.name, each.alias) for each in attrs.fields(TrainState))


def changed(state: TrainState, **fields: Any) -> TrainState:
    """Return the state with other fields, as `attrs.evolve` does."""
    made = object.__new__(TrainState)
    for name, alias in _FIELDS:
        if alias not in fields:
            fields[alias] = getattr(state, name)
    fill(made, **fields)
    return made
