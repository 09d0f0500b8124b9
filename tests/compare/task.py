# SPDX-License-Identifier: Apache-2.0
"""What all four train: a small network on handwritten digits, and what they record of it.

2 epochs of 1,697 images, 100 an update, none left out: the last update of an epoch has 97, which
two processes cannot share evenly. Order, seed and optimizer are the same.
"""

import json
import os
import resource
import sys
import time
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

BATCH, EPOCHS, RATE = 100, 2, 0.1
NUM_TRAINED = 1697  # the others are held out


def make_model() -> nn.Module:
    """Return the network, the same whenever it is made."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def datasets() -> tuple[TensorDataset, TensorDataset]:
    """Return the digits to train on, in an order that no loader changes, and those held out."""
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    inputs, targets = (
        torch.tensor(images / 16).float()[order],
        torch.tensor(labels)[order],
    )
    cut = NUM_TRAINED
    return TensorDataset(inputs[:cut], targets[:cut]), TensorDataset(
        inputs[cut:], targets[cut:]
    )


class Record:
    """What one process saw: losses, samples, milliseconds."""

    def __init__(self) -> None:
        """Begin."""
        self.losses: list[float] = []
        self.samples: list[int] = []
        self.times: list[float] = []
        self._since = time.perf_counter()

    def update(self, loss: float, samples: int) -> None:
        """Note an update: the loss that this process has of it, and its own samples."""
        now = time.perf_counter()
        self.times.append(now - self._since)
        self._since = now
        self.losses.append(loss)
        self.samples.append(samples)

    def write(self, model: nn.Module) -> None:
        """Leave it in the folder that the command line names, with the loss on what is held out."""
        inputs, targets = datasets()[1].tensors
        with torch.no_grad():
            held_out = cross_entropy(model.cpu()(inputs), targets).item()
        found = {
            "losses": self.losses,
            "samples": self.samples,
            "ms": sorted(self.times)[len(self.times) // 2] * 1000,
            "mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            "held_out": held_out,
        }
        rank = os.environ.get("RANK", "0")
        Path(sys.argv[1], f"{rank}.json").write_text(json.dumps(found))
