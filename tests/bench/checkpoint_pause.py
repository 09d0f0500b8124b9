# SPDX-License-Identifier: Apache-2.0
"""Benchmark of the pause of training at a save: `measure_pause` of `checkpoint`."""

from checkpoint import measure_pause as measure

__all__ = ["measure"]
