# SPDX-License-Identifier: Apache-2.0
"""Orders for `Data(order=)`, beside `shuffle=True` and functions of one's own."""

from accelfn.data.order import bucketed, weighted

__all__ = ["bucketed", "weighted"]
