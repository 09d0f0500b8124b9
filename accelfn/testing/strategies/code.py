# SPDX-License-Identifier: Apache-2.0
"""Records that print as the call that makes them, so that a failing example can be pasted."""

from typing import Any

import attrs

from accelfn.base.signatures import qualname


def as_code(self: Any) -> str:
    """Return the call that makes a record; what is at its default is left out."""
    shown: list[str] = []
    for field in attrs.fields(type(self)):
        value = getattr(self, field.name)
        if field.default is not attrs.NOTHING and value == field.default:
            continue
        name = qualname(value)
        shown.append(f"{field.name}={name}" if field.kw_only else name)
    return f"{type(self).__name__}({', '.join(shown)})"


def print_code(self: Any, p: Any, cycle: bool) -> None:  # noqa: FBT001 - IPython's protocol
    """Print the repr: as `_repr_pretty_`, what hypothesis shows of a failing example."""
    del cycle
    first, *others = repr(self).splitlines()
    p.text(first)
    for line in others:
        p.break_()
        p.text(line)
