# SPDX-License-Identifier: Apache-2.0
"""How long something says it is."""

from typing import Any


def promised_length(value: Any) -> int | None:
    """Return the length that a dataset, stream or sampler says it has, if it says one."""
    try:
        return len(value)
    except (TypeError, NotImplementedError):
        return None
