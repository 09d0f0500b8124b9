# SPDX-License-Identifier: Apache-2.0
"""Tests; programs for rank processes are imported from here by name."""
