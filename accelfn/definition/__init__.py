# SPDX-License-Identifier: Apache-2.0
"""The fixed settings of a state: transforms, chains, layouts, and checks of their values."""
