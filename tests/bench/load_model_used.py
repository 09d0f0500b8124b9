# SPDX-License-Identifier: Apache-2.0
"""Loading a model and a first forward pass: the `measure_used` of `load_model`."""

from load_model import measure_used as measure

__all__ = ["measure"]
