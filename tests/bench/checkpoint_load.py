# SPDX-License-Identifier: Apache-2.0
"""Benchmark of loading a checkpoint: `measure_load` of `checkpoint`."""

from checkpoint import measure_load as measure

__all__ = ["measure"]
