# SPDX-License-Identifier: Apache-2.0
"""Benchmark of reading shuffled rows of tensors and of NumPy arrays, without training."""

from figures import Figure
from models import Arrays, rows
from reading import prepared, read, read_by_accelfn, stateful
from rounds import compared, timed
from torch.utils.data import DataLoader, Dataset, TensorDataset

STEPS = 500


def measure(rounds: int) -> list[Figure]:
    """Measure the time of a batch of 32; tensors and arrays are compared separately."""
    inputs, targets = rows(32 * STEPS)
    tensors = TensorDataset(inputs, targets)
    arrays = (inputs.numpy(), targets.numpy())
    return [
        *_measure(rounds, "tensors", tensors, tensors),
        *_measure(rounds, "arrays", Arrays(*arrays), arrays),
    ]


def _measure(rounds: int, kind: str, dataset: Dataset, given: object) -> list[Figure]:
    loader = DataLoader(dataset, batch_size=32, shuffle=True)
    loops = {
        f"torch DataLoader, {kind}": read(loader),
        f"StatefulDataLoader, {kind}": read(stateful(dataset)),
        f"Accelerate, {kind}": read(prepared(loader)),
        f"accelfn, {kind}": read_by_accelfn(given, epochs=1),
    }
    return compared(timed(loops, rounds=rounds, steps=STEPS))
