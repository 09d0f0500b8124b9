# SPDX-License-Identifier: Apache-2.0
"""What every room builds on: arguments, trees of tensors, random draws, words, contexts."""
