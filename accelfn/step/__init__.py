# SPDX-License-Identifier: Apache-2.0
"""One update: compute the gradients of a loss, then the next state."""
