# SPDX-License-Identifier: Apache-2.0
"""The accelerator of this process: the fake one in CI, or a machine's own.

What is trained on the fake one is the CPU's to the bit. Kernels of hardware add in other orders,
so there it is near, and bits are compared between runs of the same device.
"""

import math
import sys
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

import accelfn as af
from tests.accelerator import fake
from tests.internals import devices, tree
from tests.states import bits
from tests.strategies import tensors

NAME = devices.kind()
DEVICE = torch.device(NAME, 0)
IS_FAKE = NAME == fake.NAME


def near(one: Any, two: Any, *, within: float = 1e-6) -> bool:
    """Whether two trees of tensors and numbers are the same: on hardware, but for rounding."""
    if isinstance(one, torch.Tensor):
        alike = one.dtype == two.dtype and one.shape == two.shape
        return alike and _close(one, two, within)
    if isinstance(one, Mapping):
        return one.keys() == two.keys() and all(
            near(one[name], two[name], within=within) for name in one
        )
    if isinstance(one, Sequence) and not isinstance(one, str):
        return len(one) == len(two) and all(
            near(*pair, within=within) for pair in zip(one, two, strict=True)
        )
    if isinstance(one, float) and not IS_FAKE:
        both = math.isclose(one, two, rel_tol=within, abs_tol=within)
        return both or (math.isnan(one) and math.isnan(two))
    return repr(one) == repr(two)


def _close(one: torch.Tensor, two: torch.Tensor, within: float) -> bool:
    one, two = one.detach().cpu().nan_to_num(), two.detach().cpu().nan_to_num()
    if IS_FAKE or not one.is_floating_point():
        return torch.equal(one, two)
    # a few hundred roundings of the dtype
    few = max(within, 512 * torch.finfo(one.dtype).eps)
    return torch.allclose(one.double(), two.double(), rtol=few, atol=few)


@contextmanager
def waits() -> Iterator[list[str]]:
    """Give the places, in accelfn, at which the host waits for the device in the block."""
    if IS_FAKE:
        with fake.waits() as found:
            yield found
        return
    found = list[str]()

    def note(message: Any, *_: Any, **__: Any) -> None:
        if "called a synchronizing" in str(message):
            stack = traceback.extract_stack(limit=6)[:-2]
            where = " < ".join(f"{each.name}:{each.lineno}" for each in stack[::-1])
            found.append(fake.place(sys._getframe(), f"waits in {where}"))

    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode(before)


def on_cpu(state: af.TrainState) -> dict[str, torch.Tensor]:
    """Return a state's tensors on the host."""
    return {name: each.cpu() for name, each in tensors(state).items()}


def different(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> list[str]:
    """Return the names of those that are not bitwise the same."""
    same = {n for n in one.keys() & two.keys() if bits(one[n]) == bits(two[n])}
    return sorted((one.keys() | two.keys()) - same)


def device_names(value: Any) -> set[str]:
    """Return the kinds of devices that a tree's tensors are on."""
    return {leaf.device.type for leaf in tree.tensor_leaves(value)}
