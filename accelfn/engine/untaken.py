# SPDX-License-Identifier: Apache-2.0
"""Which parameters have a gradient: none before a backward pass, all after one that reduces."""

from collections.abc import Iterable, Sequence

import torch

from accelfn.errors import LossError, UnusedParametersError


def check_untaken(pairs: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Raise where a loss function has run a backward pass of its own.

    The first and the last parameter are looked at, for this is asked at every step.

    Raises:
        LossError: one has a gradient.
    """
    if pairs[0][1].grad is not None or pairs[-1][1].grad is not None:
        msg = (
            "The loss function has left gradients behind. It returns a loss, and the step"
            " runs the backward pass: leave loss.backward() out of it."
        )
        raise LossError(msg)


def refuse_unused(unused: Iterable[str]) -> None:
    """Refuse parameters for whose gradients DistributedDataParallel would wait.

    Raises:
        UnusedParametersError: always; they are named.
    """
    names = list(unused)
    msg = (
        f"{len(names)} parameters took no part in the loss: {', '.join(names[:5])}."
        " DistributedDataParallel waits for all: use"
        " af.wrap_ddp(find_unused_parameters=True), or freeze them with"
        " requires_grad_(False)."
    )
    raise UnusedParametersError(msg)
