# SPDX-License-Identifier: Apache-2.0
"""How precisely torch multiplies float32, which a program may lower to be faster.

torch has two interfaces to one setting, and refuses the older once the newer was used for one of
the devices: the newer is read here, which knows what the older sets.
"""

from collections.abc import Sequence
from typing import Any

import torch

_EPS = {"tf32": 2.0**-10, "bf16": 2.0**-7}
"""Of what a product's factors are rounded to."""


def precisions() -> tuple[str, ...]:
    """Return the precision on CUDA's devices, and that of oneDNN on others."""
    return tuple(each.fp32_precision for each in _products())


def set_precisions(both: Sequence[str]) -> None:
    """Set both."""
    for each, precision in zip(_products(), both, strict=True):
        each.fp32_precision = precision


def eps() -> float:
    """Return the rounding of a product of float32, on whichever device it is coarsest."""
    return max(
        torch.finfo(torch.float32).eps, *(_EPS.get(p, 0.0) for p in precisions())
    )


def _products() -> tuple[Any, Any]:
    backends: Any = torch.backends
    return backends.cuda.matmul, backends.mkldnn.matmul
