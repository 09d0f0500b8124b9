# SPDX-License-Identifier: Apache-2.0
"""Engines bind states to PyTorch's machinery; nothing here is public."""
