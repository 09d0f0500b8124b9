# SPDX-License-Identifier: Apache-2.0
"""The transforms, one file per family; no transform imports another."""
