# SPDX-License-Identifier: Apache-2.0
"""Models' files: what others wrote, read; what was trained, given away."""
