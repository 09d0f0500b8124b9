# SPDX-License-Identifier: Apache-2.0
"""What takes a step on live tensors."""
