# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: the `measure_load` of `checkpoint`."""

from checkpoint import measure_load as measure

__all__ = ["measure"]
