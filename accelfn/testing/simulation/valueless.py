# SPDX-License-Identifier: Apache-2.0
"""What is said where ranks are on the meta device, and one of them asks for a value."""

import os
from pathlib import Path
from traceback import walk_tb

import torch

from accelfn.errors import Error, SimulationError

_TORCH = str(Path(torch.__file__).parent) + os.sep
_LIBRARY = str(Path(__file__).parents[3]) + os.sep


def explained(error: BaseException) -> BaseException:
    """Return what names the line that asked for a value; what is no such error is as it was."""
    first = error.__cause__ if isinstance(error, Error) else error
    is_torchs = isinstance(first, (RuntimeError, ValueError)) and not isinstance(
        first, Error
    )
    if not is_torchs or "meta" not in str(first).lower():
        return error
    msg = (
        f"{_line_of(error)} asks for values, and tensors on the meta device have none:"
        f" {str(first).splitlines()[0].rstrip('.;!')}. Leave out what reads them, as float(loss),"
        " af.mean(metrics, world) or a transform that decides by them; or let it run with"
        ' values, device="cpu".'
    )
    raised = SimulationError(msg)
    raised.__cause__ = error
    return raised


def _line_of(error: BaseException) -> str:
    """Return file and line of the innermost frame that is not torch's, nor passes a call on."""
    found = ""
    for frame, line in walk_tb(error.__traceback__):
        code = frame.f_code
        path, passes_on = code.co_filename, code.co_name == "__torch_function__"
        if not passes_on and not path.startswith((_TORCH, "<")):
            found = f"{path.removeprefix(_LIBRARY)}:{line}"
    return found
