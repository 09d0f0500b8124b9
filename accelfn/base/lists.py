# SPDX-License-Identifier: Apache-2.0
"""One call for many tensors: torch's fused operators on lists, which have no public name.

Functions with a _ at the end work in place; none does anything to an empty list. Of tensors
that lie over the ranks it is the part of this rank that they work on.
"""

from collections.abc import Iterable

import torch

from accelfn.base.shards import local


def _parts(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    # as `local`, which is not called for each, for steps have many
    return [
        each if type(each) is torch.Tensor else getattr(each, "_local_tensor", each)
        for each in tensors
    ]


def _beside(
    number: float | torch.Tensor, tensors: Iterable[torch.Tensor]
) -> float | torch.Tensor:
    """Return a number that every tensor can be multiplied by, or divided.

    A tensor on the host takes no number of a device. The number is copied to the host then,
    for which the device is waited for, as it was for the tensors that it gave to the host.
    """
    if isinstance(number, torch.Tensor) and not number.is_cpu:
        return number.cpu() if any(each.is_cpu for each in tensors) else number
    return number


def mul_(tensors: Iterable[torch.Tensor], factor: float | torch.Tensor) -> None:
    """Multiply each tensor by one number."""
    found = _parts(tensors)
    if found:
        factor = _beside(factor, found)
        torch._foreach_mul_(found, factor)  # pyright: ignore[reportPrivateUsage]


def div_(tensors: Iterable[torch.Tensor], divisor: float | torch.Tensor) -> None:
    """Divide each tensor by one number."""
    found = _parts(tensors)
    if found:
        divisor = _beside(divisor, found)
        torch._foreach_div_(found, divisor)  # pyright: ignore[reportPrivateUsage]


fused_adam_ = torch._fused_adam_  # pyright: ignore[reportPrivateUsage]
fused_adamw_ = torch._fused_adamw_  # pyright: ignore[reportPrivateUsage]


def add_(
    tensors: Iterable[torch.Tensor],
    others: Iterable[torch.Tensor],
    *,
    alpha: float = 1,
) -> None:
    """Add `alpha` times another tensor to each."""
    found = _parts(tensors)
    if found:
        torch._foreach_add_(found, _parts(others), alpha=alpha)  # pyright: ignore[reportPrivateUsage]


def lerp_(
    tensors: Iterable[torch.Tensor], ends: Iterable[torch.Tensor], share: float
) -> None:
    """Move each tensor towards another by a share of the way; one that is there stays."""
    found = _parts(tensors)
    if found:
        torch._foreach_lerp_(found, _parts(ends), share)  # pyright: ignore[reportPrivateUsage]


def copy_(tensors: Iterable[torch.Tensor], sources: Iterable[torch.Tensor]) -> None:
    """Copy another tensor into each."""
    found = _parts(tensors)
    if found:
        torch._foreach_copy_(found, _parts(sources))  # pyright: ignore[reportPrivateUsage]


def norms(
    tensors: Iterable[torch.Tensor],
    norm_type: float,
    *,
    dtype: torch.dtype | None = None,
) -> list[torch.Tensor]:
    """Return the norm of each, computed in its own dtype or the one given."""
    found = _parts(tensors)
    return list(torch._foreach_norm(found, norm_type, dtype=dtype)) if found else []  # pyright: ignore[reportPrivateUsage]


def non_finite(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return 1 if any element is infinite or not a number, else 0, on the device of the first.

    One pass, in which torch's kernel multiplies by 1: numbers stay bitwise what they are.
    """
    found = [_dense(local(tensor)) for tensor in tensors]
    device = found[0].device if found else None
    # the kernel takes float32 alone, whatever the default dtype is
    flag = torch.zeros((), dtype=torch.float32, device=device)
    here = [each for each in found if each.device == device]
    if here:
        torch._amp_foreach_non_finite_check_and_unscale_(  # pyright: ignore[reportPrivateUsage]
            here, flag, torch.ones_like(flag)
        )
    elsewhere = [each for each in found if each.device != device]
    return flag.maximum(non_finite(elsewhere).to(device)) if elsewhere else flag


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return the real numbers that a tensor holds; a view."""
    if tensor.is_sparse:
        tensor = tensor._values()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def clamp_(tensors: Iterable[torch.Tensor], low: float, high: float) -> None:
    """Bound every element of each."""
    found = _parts(tensors)
    if found:
        torch._foreach_clamp_min_(found, low)  # pyright: ignore[reportPrivateUsage]
        torch._foreach_clamp_max_(found, high)  # pyright: ignore[reportPrivateUsage]
