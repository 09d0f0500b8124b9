# SPDX-License-Identifier: Apache-2.0
"""The packages behind the backends, imported when one is used."""

from importlib import import_module
from typing import Any

from accelfn.errors import TrackingError
from accelfn.track.values import Pixels


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


def picture(image: Pixels, *, extra: str) -> Any:
    """Return an image as one of Pillow's, which takes a lone channel without its axis.

    Raises:
        TrackingError: Pillow is missing; the text says what to install.
    """
    pixels = image[:, :, 0] if image.shape[2] == 1 else image
    return package("PIL.Image", extra=extra).fromarray(pixels)
