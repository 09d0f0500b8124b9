# SPDX-License-Identifier: Apache-2.0
"""A call's argument that is to be a state, looked at before anything is done with it."""

from collections.abc import Mapping

from torch import nn

from accelfn.errors import ArgumentError
from accelfn.state.state import TrainState


def check_state(call: str, value: object) -> None:
    """Raise unless a call, as the user wrote it, was given a state.

    Raises:
        ArgumentError: it was given something else.
    """
    if isinstance(value, TrainState):
        return
    hint = ""
    if isinstance(value, tuple) and any(isinstance(each, TrainState) for each in value):
        hint = " A step returns two things: state, metrics = step(state, batch)."
    elif isinstance(value, (nn.Module, Mapping)):
        hint = (
            " A state is what TrainState.create(model=..., optimizer=...) returned; it holds"
            " the model and its parameters."
        )
    msg = f"{call}: expected a TrainState, got {type(value).__name__}.{hint}"
    raise ArgumentError(msg)
