# SPDX-License-Identifier: Apache-2.0
"""Benchmark of memory for the first batch of a huge dataset: see `data_scale`."""

from data_scale import measure_memory as measure

__all__ = ["measure"]
