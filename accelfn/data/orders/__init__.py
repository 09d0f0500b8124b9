# SPDX-License-Identifier: Apache-2.0
"""Orders for `Data(order=)`, beside `shuffle=True` and functions of one's own."""

from accelfn.data.orders.buckets import bucketed as bucketed
from accelfn.data.orders.weights import weighted as weighted
