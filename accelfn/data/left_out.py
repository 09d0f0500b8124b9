# SPDX-License-Identifier: Apache-2.0
"""Samples that a user's collate leaves out, of which a plain mean does not know."""

from typing import Any

from accelfn.base import tree
from accelfn.base.advice import advise
from accelfn.errors import BatchError

_FEWEST = 2
"""Samples of a batch that says whether rows are samples."""


class LeftOut:
    """Looks at batches of a user's collate, until it has told that one is short.

    What makes rows of its own kind, as packed sequences are, says nothing by their number;
    so the first batch must have a row for each sample.
    """

    def __init__(self) -> None:
        """Begin with the next batch."""
        self._looks, self._has_rows = True, False

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
        if num_rows == num_samples:
            self._has_rows = True
        elif not self._has_rows:
            self._looks = False
        elif num_rows is not None and num_rows < num_samples:
            self._looks = False
            advise(
                f"collate made {num_rows} rows of {num_samples} samples. {mean} is a mean over"
                f" the rows that are left, and counts for {num_samples} samples beside other"
                " means. Return totals with what they are of, af.Loss(total, num_rows), or"
                " leave such samples out of the dataset."
            )
