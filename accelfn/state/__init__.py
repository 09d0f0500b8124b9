# SPDX-License-Identifier: Apache-2.0
"""Where a training stands, as plain records: states, gradients, metrics."""
