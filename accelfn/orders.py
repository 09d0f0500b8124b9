# SPDX-License-Identifier: Apache-2.0
"""Sample orders for `af.Data(order=...)`, in addition to `shuffle=True` and your functions."""

from accelfn.data.order import bucketed, weighted

__all__ = ["bucketed", "weighted"]
