# SPDX-License-Identifier: Apache-2.0
"""Placement of a model's modules on several devices, in host memory and on disk."""
