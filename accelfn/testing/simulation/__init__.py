# SPDX-License-Identifier: Apache-2.0
"""Simulated ranks: threads that take turns, with collectives in memory."""
