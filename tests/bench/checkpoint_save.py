# SPDX-License-Identifier: Apache-2.0
"""Benchmark of a complete save: `measure_save` of `checkpoint`."""

from checkpoint import measure_save as measure

__all__ = ["measure"]
