# SPDX-License-Identifier: Apache-2.0
"""Tests on a fake accelerator."""
