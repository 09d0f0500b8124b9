# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that earlier versions wrote, and what is in them."""
