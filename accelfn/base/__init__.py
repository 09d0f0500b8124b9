# SPDX-License-Identifier: Apache-2.0
"""Argument checks, trees of tensors, random draws, devices and the codec, for every folder."""
