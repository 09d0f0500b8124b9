# SPDX-License-Identifier: Apache-2.0
"""The packages behind the backends, imported when one is used."""

from importlib import import_module
from typing import Any

from accelfn.errors import TrackingError


def package(module: str, *, extra: str) -> Any:
    """Import a module that an optional extra brings.

    Raises:
        TrackingError: it is missing; the text says what to install.
    """
    try:
        return import_module(module)
    except ImportError as error:
        msg = (
            f"af.track: {module} is not to be had ({error}). Install it:"
            f' python -m pip install "accelfn[{extra}]".'
        )
        raise TrackingError(msg) from error
