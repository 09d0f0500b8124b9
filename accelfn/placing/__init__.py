# SPDX-License-Identifier: Apache-2.0
"""Models over several devices, the host and the disk: where each part is, and computing so."""
