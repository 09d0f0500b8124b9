# SPDX-License-Identifier: Apache-2.0
"""Traffic: what a program sends on any number of ranks, and how long a link takes for it."""
