# SPDX-License-Identifier: Apache-2.0
"""What differs: between values, states, setups, loops and what they communicate."""
