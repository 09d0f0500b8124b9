# SPDX-License-Identifier: Apache-2.0
"""One update: gradients of a loss, then the next state."""
