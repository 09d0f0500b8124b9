# SPDX-License-Identifier: Apache-2.0
"""Benchmark of reading a slow dataset with two worker processes."""

from figures import Figure
from models import Slow, rows
from reading import prepared, read, read_by_accelfn, stateful
from rounds import compared, timed
from torch.utils.data import DataLoader

EPOCHS, STEPS = 3, 50
WORKERS = {"num_workers": 2}


def measure(rounds: int) -> list[Figure]:
    """Measure the time of a batch of 32, including the start of workers."""
    dataset = Slow(*rows(32 * STEPS))
    loader = DataLoader(dataset, batch_size=32, shuffle=True, **WORKERS)
    kept = DataLoader(
        dataset, batch_size=32, shuffle=True, persistent_workers=True, **WORKERS
    )
    loops = {
        "torch DataLoader": read(loader, epochs=EPOCHS),
        "torch DataLoader, persistent_workers": read(kept, epochs=EPOCHS),
        "StatefulDataLoader": read(stateful(dataset, **WORKERS), epochs=EPOCHS),
        "Accelerate": read(prepared(loader), epochs=EPOCHS),
        "accelfn": read_by_accelfn(dataset, epochs=EPOCHS, **WORKERS),
    }
    return compared(timed(loops, rounds=rounds, steps=EPOCHS * STEPS))
