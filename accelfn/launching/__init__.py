# SPDX-License-Identifier: Apache-2.0
"""Starting the ranks of a run from a command line, a settings file or a function."""
