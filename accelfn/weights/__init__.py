# SPDX-License-Identifier: Apache-2.0
"""Importing and exporting model weights."""
