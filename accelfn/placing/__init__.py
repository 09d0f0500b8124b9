# SPDX-License-Identifier: Apache-2.0
"""Models spread over devices, host memory and disk."""
