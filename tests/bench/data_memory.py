# SPDX-License-Identifier: Apache-2.0
"""What the starts of `data_scale` add to a process's memory, in MiB."""

from data_scale import measure_memory as measure

__all__ = ["measure"]
