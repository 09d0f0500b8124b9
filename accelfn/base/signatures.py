# SPDX-License-Identifier: Apache-2.0
"""Signatures of functions and annotations of classes, with names that only a checker has.

Since Python 3.14 an annotation is evaluated when it is read, and by default raises for a name
that was imported under `TYPE_CHECKING`; before, the annotation itself raised, or was a text.
"""

import inspect
import sys

if sys.version_info >= (3, 14):
    from functools import partial

    from annotationlib import Format, get_annotations

    annotations_of = partial(get_annotations, format=Format.FORWARDREF)
    signature = partial(inspect.signature, annotation_format=Format.FORWARDREF)
else:
    annotations_of = inspect.get_annotations
    signature = inspect.signature
