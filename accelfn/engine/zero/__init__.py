# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's ZeRO: what it holds of a state, and how states live in it."""
