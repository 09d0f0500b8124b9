# SPDX-License-Identifier: Apache-2.0
"""The version of torch: the oldest that accelfn works with, and what older versions lack."""

import re
from typing import Any

import torch
import torch.distributed as dist

from accelfn.errors import CompositionError

_LEAST = (2, 11)
VERSION = tuple(int(number) for number in re.findall(r"\d+", torch.__version__)[:2])

IS_OLD = VERSION < (2, 13)
"""Whether some names of torch 2.13 are missing; see docs/compatibility.md."""

reduce_scatter_single: Any = vars(dist)[
    "reduce_scatter_tensor" if IS_OLD else "reduce_scatter_single"
]


def check_floor() -> None:
    """Raise if torch is too old for accelfn.

    Raises:
        ImportError: torch is older than 2.11.
    """
    if VERSION < _LEAST:
        msg = (
            f"accelfn needs torch 2.11 or later, but this is torch {torch.__version__}. Install a"
            " newer torch: python -m pip install -U torch."
        )
        raise ImportError(msg)


def check_new(owner: object) -> None:
    """Raise if a transform needs torch 2.13.

    Raises:
        CompositionError: torch is older.
    """
    if IS_OLD:
        msg = f"{owner!r} needs torch 2.13 or later, but this is torch {torch.__version__}."
        raise CompositionError(msg)


def ddp_options(options: dict[str, Any]) -> dict[str, Any]:
    """Return DDP's options, with the names that this version of torch has for them."""
    if not IS_OLD:
        return options
    sync = options.pop("forward_sync_buffers", True)
    return {**options, "broadcast_buffers": sync}
