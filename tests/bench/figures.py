# SPDX-License-Identifier: Apache-2.0
"""The result of a benchmark for one contestant (accelfn, or another loop)."""

import attrs


@attrs.frozen(kw_only=True)
class Figure:
    """The cost of a contestant, and its comparison with the base, the first contestant.

    Attributes:
        contestant: the name of the contestant.
        milliseconds: the median over rounds of the time of one step or one start.
        value: the median of the comparisons with the base, one comparison per round.
        low: the first quartile of the comparisons.
        high: the third quartile of the comparisons.
        all_reduces: the number of all-reduces of an update, if counted.
        num_bytes: the bytes that all ranks sent in an update, including headers, if counted.
        foreseen_bytes: the bytes that a model of the traffic predicts.
        foreseen: the milliseconds that a model of the traffic predicts.
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
