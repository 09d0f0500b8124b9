# SPDX-License-Identifier: Apache-2.0
"""Which parameters are of a model that is placed: its forward works, and nothing else does."""

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from accelfn.errors import ModelError

PLACED = WeakIdKeyDictionary()
"""Parameters that stand elsewhere until their context ends."""


def refuse_placed(module: nn.Module) -> None:
    """Raise if a model, or a part of it, is placed now.

    Raises:
        ModelError: it is.
    """
    names = [name for name, param in module.named_parameters() if param in PLACED]
    if names:
        msg = (
            f"{type(module).__name__} is placed by af.placed, {names[0]} among others: its"
            " parameters stand on other devices, or on the disk, for its forward alone. Use it"
            " after the `with` block, or give a factory. A model that is trained over several"
            " devices is split by af.wrap_fsdp() or af.tensor_parallel()."
        )
        raise ModelError(msg)
