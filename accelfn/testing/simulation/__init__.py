# SPDX-License-Identifier: Apache-2.0
"""Simulated ranks: threads that take turns, and collectives in memory."""
