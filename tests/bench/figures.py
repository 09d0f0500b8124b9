# SPDX-License-Identifier: Apache-2.0
"""What a benchmark found out about one contestant."""

import attrs


@attrs.frozen(kw_only=True)
class Figure:
    """A cost beside that of the benchmark's base.

    Attributes:
        contestant: whose cost it is.
        milliseconds: the median over rounds, of one step or one start.
        value: the median of the comparisons with the base, one comparison a round.
        low: their first quartile.
        high: their third quartile.
        all_reduces: how many an update makes, where that was counted.
        num_bytes: what all ranks sent for an update, headers included, where it was counted.
        foreseen_bytes: what a model says that they send.
        foreseen: the milliseconds that a model says it takes.
    """

    contestant: str
    milliseconds: float
    value: float
    low: float
    high: float
    all_reduces: float | None = None
    num_bytes: float | None = None
    foreseen_bytes: float | None = None
    foreseen: float | None = None
