# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of other libraries: read, and written for them."""
