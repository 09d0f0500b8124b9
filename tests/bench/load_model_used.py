# SPDX-License-Identifier: Apache-2.0
"""Benchmark of loading a model and a first forward pass: `measure_used` of `load_model`."""

from load_model import measure_used as measure

__all__ = ["measure"]
