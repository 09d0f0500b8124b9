# SPDX-License-Identifier: Apache-2.0
"""Which parameters have a gradient: none before a backward pass, all after one that reduces."""

from collections.abc import Container, Iterable, Mapping
from typing import NoReturn

import torch

from accelfn.errors import LossError, UnusedParametersError


def refuse_taken() -> NoReturn:
    """Refuse a loss function that has run a backward pass of its own.

    Raises:
        LossError: always.
    """
    msg = (
        "The loss function has left gradients behind. It returns a loss, and the step"
        " runs the backward pass: leave loss.backward() out of it."
    )
    raise LossError(msg)


def refuse_frozen(trained: Mapping[str, torch.Tensor], found: Container[str]) -> None:
    """Refuse a loss function that froze parameters, once they are trained again.

    Args:
        trained: what is to have a gradient, by name.
        found: what has one.

    Raises:
        LossError: it froze some, which are named.
    """
    frozen = [n for n, p in trained.items() if n not in found and not p.requires_grad]
    for name in frozen:
        trained[name].requires_grad_()
    if frozen:
        msg = (
            f"The loss function froze {len(frozen)} parameters that are trained:"
            f" {_listed(frozen)}. Which ones are trained belongs to the state: call"
            " requires_grad_(False) in the model's factory, or write state ="
            " state.with_trainable(lambda name, param: ...)."
        )
        raise LossError(msg)


def refuse_apart() -> NoReturn:
    """Refuse a loss of which no trained parameter has a gradient.

    Raises:
        LossError: always.
    """
    msg = (
        "The loss depends on no trainable parameter of the model, only on other"
        " tensors that require a gradient."
    )
    raise LossError(msg)


def refuse_unused(unused: Iterable[str], *, are_held: bool) -> NoReturn:
    """Refuse parameters for whose gradients the ranks would wait.

    Args:
        unused: their names.
        are_held: whether gradients are DeepSpeed's, which knows no option for it.

    Raises:
        UnusedParametersError: always; they are named.
    """
    names = list(unused)
    options = (
        "take af.wrap_fsdp(find_unused_parameters=True), use them by 0, as in"
        " `+ 0 * net.head.weight.sum()`,"
        if are_held
        else "give af.wrap_ddp or af.wrap_fsdp find_unused_parameters=True,"
    )
    msg = (
        f"{len(names)} parameters took no part in the loss: {_listed(names)}."
        f" Ranks wait for the gradients of all: {options} or freeze them with"
        " requires_grad_(False)."
    )
    raise UnusedParametersError(msg)


def _listed(names: list[str]) -> str:
    """Return the first names, and how many more there are."""
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more
