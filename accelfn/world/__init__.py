# SPDX-License-Identifier: Apache-2.0
"""The world: which rank this is, of how many, and how ranks meet, talk and part."""

from accelfn.world.world import World as World
