# SPDX-License-Identifier: Apache-2.0
"""The engine's own module, as transforms make it."""

import torch
from torch import nn

from accelfn.definition.fields import check_returned
from accelfn.errors import ModelError
from accelfn.state.state import TrainState


def made(module: nn.Module, state: TrainState) -> nn.Module:
    """Return the engine's own module as the setup's transforms make it.

    It is changed in place: its parameters have their home in it.

    Raises:
        ModelError: a transform returned one of other parameters.
    """
    for owner in state.definition.setup.owners["module"]:
        before = _held_by(module)
        returned = owner.module(module, state)
        ok, what = isinstance(returned, nn.Module), "a module"
        check_returned(owner, "module", ok=ok, returned=returned, expected=what)
        after = _held_by(returned)
        others = {
            n for n in before.keys() | after.keys() if before.get(n) is not after.get(n)
        }
        if others:
            msg = (
                f"{owner!r}.module returned a module of other parameters or buffers"
                f" ({', '.join(sorted(others)[:5])}), which no state would hold. Return the"
                " one that was given, changed in place."
            )
            raise ModelError(msg)
        module = returned
    return module


def _held_by(module: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}
