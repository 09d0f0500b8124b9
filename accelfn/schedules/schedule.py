# SPDX-License-Identifier: Apache-2.0
"""What a schedule is: a pure function of the update number."""

from typing import Protocol


class Schedule(Protocol):
    """A pure function of the update number."""

    def __call__(self, step: int, /) -> float:
        """Return the factor for update `step`, the first being 0."""
        ...
