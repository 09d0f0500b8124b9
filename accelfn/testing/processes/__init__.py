# SPDX-License-Identifier: Apache-2.0
"""Ranks that are real processes, and what they give beside simulated ones."""
