# SPDX-License-Identifier: Apache-2.0
"""Leaves of a loss's graph that nobody trains: a criterion's parameters, or those given away."""

from collections.abc import Container
from typing import Any
from weakref import ref

import torch
from torch import nn

from accelfn.base.advice import advise
from accelfn.errors import LossError
from accelfn.state.views import was_lent


class Strangers:
    """The leaves of a loss function's first graph that are none of the state's.

    No pass adds to their `grad`, or a step would depend on the steps before it.
    """

    def __init__(self, loss: torch.Tensor, known: Container[int]) -> None:
        """Warn if some are parameters.

        Args:
            loss: whose graph is looked through.
            known: ids of the parameters that the model has as it runs.

        Raises:
            LossError: some are of a module that was lent, and is empty by now.
        """
        found = [each for each in _leaves_of(loss) if id(each) not in known]
        _warn_of([each for each in found if isinstance(each, nn.Parameter)])
        self.leaves = [ref(each) for each in found]

    def set_aside(self) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        """Let those that still live have no gradient; return them with what they had."""
        aside = [
            (each, each.grad) for one in self.leaves if (each := one()) is not None
        ]
        for each, _ in aside:
            each.grad = None
        return aside


def _warn_of(strangers: list[nn.Parameter]) -> None:
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
            f" function is given, of shapes {shapes[:5]}. No step trains them, or adds to"
            " their grad. A criterion with parameters belongs"
            " into the model; of a model that was given away take the parameters in the loss"
            " function, model.parameters(); one that only judges is af.frozen(state), or has"
            " requires_grad_(False)."
        )


def _leaves_of(loss: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors at the ends of a graph."""
    found: list[torch.Tensor] = []
    seen, left = set[Any](), [loss.grad_fn]
    while left:
        node: Any = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (end := getattr(node, "variable", None)) is not None:
            found.append(end)
        left += [after for after, _ in node.next_functions]
    return found
