# SPDX-License-Identifier: Apache-2.0
"""Split every batch over the ranks."""

from accelfn.data import Plan
from accelfn.definition.transform import transform


@transform
class shard_data:
    """Give each rank its share of every batch.

    The global batch is cut into contiguous shares that differ by at most one sample,
    before anything is read; a short last batch is cut like any other. A share may be
    empty: its rank takes part with one sample of weight 0.

    Acts on: data.

    Law:
        The global order of samples, and with `wrap_ddp` the result of a step, do not depend on
        the number of ranks (up to rounding; batch statistics excepted).

    Cost:
        Arithmetic on two integers a batch.

    Example:
        >>> shard_data()
        af.shard_data()
    """

    def data(self, plan: Plan) -> Plan:
        """Cut a batch into one share a rank."""
        return plan.sharded()
