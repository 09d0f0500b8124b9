# SPDX-License-Identifier: Apache-2.0
"""The tests, as a package: rank processes import their programs from `tests.*` by name."""
