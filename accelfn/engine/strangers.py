# SPDX-License-Identifier: Apache-2.0
"""Parameters that a loss depends on and nobody trains: a criterion's own, or those given away."""

from collections.abc import Container
from typing import Any

import torch
from torch import nn

from accelfn.base.advice import advise
from accelfn.errors import LossError
from accelfn.state.views import was_lent


def warn_of_strangers(loss: torch.Tensor, known: Container[int]) -> None:
    """Say if a loss depends on parameters that are none of the state's.

    Args:
        loss: whose graph is looked through.
        known: ids of the parameters that the model has as it runs.

    Raises:
        LossError: some are of a module that was lent, and is empty by now.
    """
    strangers = [each for each in _parameters_of(loss) if id(each) not in known]
    if any(map(was_lent, strangers)):
        msg = (
            "The loss depends on a module that af.bind lent for a with block, which has ended"
            " before the backward pass: it is empty. A model that judges is af.frozen(other),"
            " made in the loss function, or before: step(state, batch, af.frozen(other))."
        )
        raise LossError(msg)
    shapes = [tuple(each.shape) for each in strangers]
    if shapes:
        advise(
            "The loss depends on parameters that are not those of the model that the loss"
            f" function is given, of shapes {shapes[:5]}. No step trains them, and their"
            " gradients are this rank's alone. A criterion with parameters belongs"
            " into the model; of a model that was given away take the parameters in the loss"
            " function, model.parameters(); one that only judges is af.frozen(state), or has"
            " requires_grad_(False)."
        )


def _parameters_of(loss: torch.Tensor) -> list[nn.Parameter]:
    """Return the parameters at the ends of a graph."""
    found: list[nn.Parameter] = []
    seen, left = set[Any](), [loss.grad_fn]
    while left:
        node: Any = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(end := getattr(node, "variable", None), nn.Parameter):
            found.append(end)
        left += [after for after, _ in node.next_functions]
    return found
