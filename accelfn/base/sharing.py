# SPDX-License-Identifier: Apache-2.0
"""Values that are apart, and share their memory until one of them is written."""

import torch


def apart(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same numbers; what is written into one, the other never sees.

    On the CPU it is torch's copy-on-write: whoever writes first, through any view and by any
    operation, takes a copy, unless the other is gone by then. A registry of who looks at a
    state's tensors could not do that, for `state_dict()`, `detach()` and slices make tensors
    that it would not know of.

    Copied at once is memory that others look at, as numpy's, a file's or another process's,
    which torch cannot share in this way; a part of a larger memory, for the whole would be
    copied for each part; and what is on a device, where kernels of another stream may still
    write when the copy is made, which nobody has tried.
    """
    plain = tensor.detach()
    if plain.device.type != "cpu" or not _fills_its_memory(plain):
        return plain.clone()
    try:
        # a private name; operators of torch are tested for what they do to such tensors
        return torch._lazy_clone(plain)  # pyright: ignore[reportPrivateUsage]
    except RuntimeError:  # it is somebody else's memory, which nothing says beforehand
        return plain.clone()


def _fills_its_memory(tensor: torch.Tensor) -> bool:
    """Whether a plain tensor has all of its memory for itself."""
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
        return False
    size = tensor.numel() * tensor.element_size()
    return 0 < size == tensor.untyped_storage().nbytes()
