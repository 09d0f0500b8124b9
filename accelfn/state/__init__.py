# SPDX-License-Identifier: Apache-2.0
"""The training state, gradients and metrics as plain records."""
