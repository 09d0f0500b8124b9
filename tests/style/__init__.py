# SPDX-License-Identifier: Apache-2.0
"""Measures of code size and plain language; each has an upper bound that may only be lowered."""
