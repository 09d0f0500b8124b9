# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: the `measure_save` of `checkpoint`."""

from checkpoint import measure_save as measure

__all__ = ["measure"]
