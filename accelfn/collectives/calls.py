# SPDX-License-Identifier: Apache-2.0
"""How a call is told: what it gives, where the user's code made it, and ranks beside ranks."""

import contextlib
import functools
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import typing_extensions

if TYPE_CHECKING:
    from types import FrameType


def shown(tensor: torch.Tensor) -> str:
    """Name a tensor's shape and dtype, and its layout if that is not the common one."""
    layout = "" if tensor.layout is torch.strided else f" {tensor.layout}"
    return f"{tuple(tensor.shape)} {tensor.dtype}{layout}".replace("torch.", "")


def table(rows: Mapping[int, tuple[str, ...]]) -> str:
    """Return one aligned line a rank."""
    width = max(len(row) for row in rows.values())
    padded = {rank: (*row, *[""] * (width - len(row))) for rank, row in rows.items()}
    widths = [max(len(row[i]) for row in padded.values()) for i in range(width)]
    lines: list[str] = []
    for rank, row in padded.items():
        cells = [cell.ljust(w) for cell, w in zip(row, widths, strict=True) if w]
        lines.append(f"  rank {rank}: {'  '.join(cells)}".rstrip())
    return "\n".join(lines)


_NOT_USERS = (
    str(Path(__file__).parents[1]) + os.sep,
    str(Path(torch.__file__).parent) + os.sep,
    typing_extensions.__file__,  # its decorator calls what torch deprecates
    contextlib.__file__,
    functools.__file__,
    "<attrs",
    "<frozen",
)


def site() -> str:
    """Return file and line of the innermost frame that is neither torch's nor accelfn's."""
    frame: FrameType | None = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame is not None:
        path = frame.f_code.co_filename
        if _is_users(path):
            return f"{path.rpartition(os.sep)[2]}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


@functools.cache
def _is_users(path: str) -> bool:
    return not path.startswith(_NOT_USERS)
