# SPDX-License-Identifier: Apache-2.0
"""Where training stands in its data: an epoch and how many of its samples were seen."""

import attrs

from accelfn.errors import ArgumentError


def _is_count(owner: object, field: "attrs.Attribute[int]", value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        msg = (
            f"{type(owner).__name__}({field.name}={value!r}): expected an integer, 0 or"
            " more."
        )
        raise ArgumentError(msg)


@attrs.frozen
class Cursor:
    """A position in the sample order, counted in global samples.

    It does not mention ranks, workers or micro-batches, so a run resumed on another
    number of them goes on at the very same sample.

    Attributes:
        epoch: which pass over the data, from 0.
        samples: how many samples of that epoch all ranks together have seen.
    """

    epoch: int = attrs.field(default=0, validator=_is_count)
    samples: int = attrs.field(default=0, validator=_is_count)
