# SPDX-License-Identifier: Apache-2.0
"""Transforms, one file each; they do not know one another."""
