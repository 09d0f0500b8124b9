# SPDX-License-Identifier: Apache-2.0
"""Simulated ranks: threads that run one at a time, with collectives in memory."""
