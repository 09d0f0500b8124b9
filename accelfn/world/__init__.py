# SPDX-License-Identifier: Apache-2.0
"""The ranks of a run: how they start, connect, detect failures and end."""

from accelfn.world.world import World as World
