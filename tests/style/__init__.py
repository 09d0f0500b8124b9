# SPDX-License-Identifier: Apache-2.0
"""Measures of size and of plain words, each with a bound that may only fall."""
