# SPDX-License-Identifier: Apache-2.0
"""Warnings that teach: what runs, but is likely not what was meant, and the line to write.

All are `af.Warning`, so one filter takes them: `warnings.simplefilter("error", af.Warning)`
makes each an error. Python says one once for the line of the user's that it is about.
"""

import os
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from accelfn.errors import Warning as AdviceWarning

if TYPE_CHECKING:
    from types import FrameType

_PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"


def advise(message: str) -> None:
    """Warn of a likely mistake, at the line of the user's own code that led to it."""
    warnings.warn(message, AdviceWarning, stacklevel=_levels_of_package() + 1)


def _levels_of_package() -> int:
    """Return how many of the innermost frames are the package's own, `advise` the first."""
    frame: FrameType | None = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    levels = 0
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame, levels = frame.f_back, levels + 1
    return levels
