# SPDX-License-Identifier: Apache-2.0
"""The engine's own module, as transforms make it."""

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
        returned, names = owner.module(module, state), dict(module.named_parameters())
        ok, what = isinstance(returned, nn.Module), "a module"
        check_returned(owner, "module", ok=ok, returned=returned, expected=what)
        params = dict(returned.named_parameters())
        if any(params.get(name) is not param for name, param in names.items()):
            msg = (
                f"{owner!r}.module returned a module of other parameters. Return the one that"
                " was given, changed in place."
            )
            raise ModelError(msg)
        module = returned
    return module
