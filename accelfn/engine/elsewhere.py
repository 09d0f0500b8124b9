# SPDX-License-Identifier: Apache-2.0
"""A loss that failed because its batch is on another device than the state."""

import torch

from accelfn.base import tree
from accelfn.engine.read_loss import Samples
from accelfn.errors import BatchError


def refuse_elsewhere(
    samples: Samples, device: torch.device, error: BaseException
) -> None:
    """Say so if tensors of a loss's arguments are elsewhere; the loss could have moved them.

    Raises:
        BatchError: some are.
    """
    given = tree.tensor_leaves((samples.value, samples.extras))
    strange = {str(each.device) for each in given if each.device.type != device.type}
    if not strange:
        return
    msg = (
        f"The loss function failed ({str(error).partition(chr(10))[0]}). It was given tensors"
        f" on {', '.join(sorted(strange))}, and the state is on {device}. Batches of"
        " af.batches(state) are there already; move another one: batch ="
        " batch.to(state.world.device)."
    )
    raise BatchError(msg) from error
