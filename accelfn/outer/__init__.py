# SPDX-License-Identifier: Apache-2.0
"""Outer optimizers: ranks train apart, and what they moved by is a gradient of their anchor."""
