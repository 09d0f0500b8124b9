# SPDX-License-Identifier: Apache-2.0
"""Bugs that the laws must find; `python -m tests.mutants` plants them one by one."""
