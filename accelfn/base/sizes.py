# SPDX-License-Identifier: Apache-2.0
"""Numbers of bytes, in words."""

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def shown(size: float) -> str:
    """Show a number of bytes in the unit that fits."""
    unit = 0
    while size >= 1024 and unit + 1 < len(_UNITS):
        size, unit = size / 1024, unit + 1
    return f"{size:.2f} {_UNITS[unit]}" if unit else f"{size:.0f} B"
