# SPDX-License-Identifier: Apache-2.0
"""What a function or a class says of itself: its name, its signature, its annotations.

Since Python 3.14 an annotation is evaluated when it is read, and by default raises for a name
that was imported under `TYPE_CHECKING`; before, the annotation itself raised, or was a text.
"""

import inspect
import sys
from typing import Any

if sys.version_info >= (3, 14):
    from functools import partial

    from annotationlib import Format, get_annotations

    annotations_of = partial(get_annotations, format=Format.FORWARDREF)
    signature = partial(inspect.signature, annotation_format=Format.FORWARDREF)
else:
    annotations_of = inspect.get_annotations
    signature = inspect.signature


def qualname(function: Any) -> str:
    """Return a function's qualified name; of what has none, as a `partial`, its repr."""
    return getattr(function, "__qualname__", None) or repr(function)
