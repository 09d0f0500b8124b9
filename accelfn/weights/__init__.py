# SPDX-License-Identifier: Apache-2.0
"""Importing, exporting and placing weights of models; checkpoints of other libraries."""
