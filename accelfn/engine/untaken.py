# SPDX-License-Identifier: Apache-2.0
"""Which parameters have a gradient: none before a backward pass, all after one that reduces."""

from collections.abc import Iterable
from typing import NoReturn

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


def refuse_unused(unused: Iterable[str]) -> NoReturn:
    """Refuse parameters for whose gradients the ranks would wait.

    Raises:
        UnusedParametersError: always; they are named.
    """
    names = list(unused)
    msg = (
        f"{len(names)} parameters took no part in the loss: {', '.join(names[:5])}."
        " Ranks wait for the gradients of all: give af.wrap_ddp or af.wrap_fsdp"
        " find_unused_parameters=True, or freeze them with requires_grad_(False)."
    )
    raise UnusedParametersError(msg)
