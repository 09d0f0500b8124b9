# SPDX-License-Identifier: Apache-2.0
"""What torch keeps of meshes and DTensors once a process, which ranks that are threads share.

A mesh is equal to another by its shape and by the thread that made it, and what torch has
worked out for a DTensor on one is kept by that. Threads' numbers are used again, so a later
rank would get an earlier one's mesh, with its place and its groups.
"""

import sys
from itertools import count
from types import SimpleNamespace
from typing import Any

from torch.distributed import device_mesh

# torch 2.13 has no public names for these
# pyright: reportPrivateUsage=false

ASKED = ((device_mesh, "get_backend"), (device_mesh, "threading"))
"""Where a mesh asks whether ranks are threads, and which it is made by."""
_numbers = count(1 << 48)


def tell_rank() -> None:
    """Tell the meshes of this rank a number that no other rank of any run has."""
    number = next(_numbers)
    answers = _threaded, SimpleNamespace(get_ident=lambda: number)
    for (module, name), answer in zip(ASKED, answers, strict=True):
        setattr(module, name, answer)


def _threaded(group: Any = None) -> str:
    del group
    return "threaded"


def forget() -> None:
    """Let torch forget what it worked out; it keeps meshes, and their groups, alive by it."""
    if "torch.distributed.tensor" not in sys.modules:
        return
    from torch.distributed.tensor import _redistribute, debug  # noqa: PLC0415

    debug._clear_sharding_prop_cache()
    _redistribute.clear_redistribute_planner_cache()
    _redistribute._gen_transform_infos.cache_clear()
