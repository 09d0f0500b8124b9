# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: the `measure_pause` of `checkpoint`."""

from checkpoint import measure_pause as measure

__all__ = ["measure"]
