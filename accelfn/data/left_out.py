# SPDX-License-Identifier: Apache-2.0
"""Samples that a user's collate leaves out, of which a plain mean does not know."""

import math
from typing import Any, cast

from accelfn.base import tree
from accelfn.base.advice import advise
from accelfn.errors import BatchError

_FEWEST = 2
"""Samples of a batch that says whether rows are samples."""


class LeftOut:
    """Looks at batches of a user's collate, until it has told that one is short.

    What makes more rows than samples, as packed sequences are, says nothing by their number,
    nor does what makes one row of two samples each time, say, or has them along another dim.
    """

    def __init__(self) -> None:
        """Begin with the next batch."""
        self._looks, self._samples_a_row = True, cast("float | None", None)

    def look(self, value: Any, num_samples: int | None, mean: str) -> None:
        """Say if a batch has fewer rows than samples.

        Args:
            value: what was collated.
            num_samples: of which, where it is known.
            mean: what is taken for one over these samples, as "The loss".
        """
        if not self._looks or num_samples is None or num_samples < _FEWEST:
            return
        try:
            num_rows = tree.num_rows(value)
        except BatchError:
            num_rows = None
        each = num_samples / num_rows if num_rows else math.inf
        known = self._samples_a_row
        if known is None:
            self._samples_a_row = each
            fewer = num_rows is not None and each > 1
            self._looks = each == 1 or (fewer and not _has_dim(value, num_samples))
        is_short = num_rows is not None and num_rows < num_samples
        as_ever = each.is_integer() if known is None else each == known
        if self._looks and is_short and not as_ever:
            self._looks = False
            advise(
                f"collate made {num_rows} rows of {num_samples} samples. {mean} is a mean over"
                f" the rows that are left, and counts for {num_samples} samples beside other"
                " means. Return totals with what they are of, af.Loss(total, num_rows), or"
                " leave such samples out of the dataset."
            )


def _has_dim(value: Any, num_samples: int) -> bool:
    """Whether a dim behind the first is that of the samples, as where time is the first."""
    return any(num_samples in each.shape[1:] for each in tree.tensor_leaves(value))
