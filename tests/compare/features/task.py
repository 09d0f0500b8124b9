# SPDX-License-Identifier: Apache-2.0
"""What both libraries train in each of Accelerate's examples by feature: small, in float64."""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

BATCH, EPOCHS, RATE = 16, 2, 0.5
NUM, UNEVEN = 64, 72
"""Samples: 4 updates an epoch, or 4 and half a batch."""
FITS = 8
"""The most samples that a device has room for, where there is a question of it."""
IN, CLASSES, WORDS, PAD = 6, 3, 11, -100


def net() -> nn.Module:
    """Return the network, the same whenever it is made."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = nn.Linear(IN, 8), nn.Tanh(), nn.Linear(8, CLASSES)
        return nn.Sequential(*layers).double()


def language_model() -> nn.Module:
    """Return a model that tells the next word from the last."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(WORDS, 8), nn.Linear(8, WORDS)).double()


def samples(num: int = NUM, *, seed: int = 0) -> TensorDataset:
    """Return inputs and classes that a network can learn, in an order that no loader changes."""
    draw = torch.Generator().manual_seed(seed)
    inputs = torch.randn(num, IN, generator=draw, dtype=torch.float64)
    return TensorDataset(inputs, inputs[:, :CLASSES].argmax(1))


def texts(num: int = NUM) -> TensorDataset:
    """Return words and the words that follow, of which every text has another number."""
    draw = torch.Generator().manual_seed(1)
    words = torch.randint(0, WORDS, (num, 9), generator=draw).cumsum(1) % WORDS
    targets = words[:, 1:].clone()
    lengths = torch.randint(1, 9, (num, 1), generator=draw)
    targets[torch.arange(8) >= lengths] = PAD
    return TensorDataset(words[:, :-1], targets)


def mean_loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    """Return the mean cross entropy of a batch."""
    inputs, targets = batch
    return cross_entropy(model(inputs), targets)


def total_loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    """Return the sum of the cross entropies of all words of a batch."""
    words, targets = batch
    scores = model(words).flatten(0, 1)
    return cross_entropy(scores, targets.flatten(), reduction="sum", ignore_index=PAD)


def in_float32() -> tuple[nn.Module, TensorDataset]:
    """Return the network and the samples in float32."""
    inputs, targets = samples().tensors
    return net().float(), TensorDataset(inputs.float(), targets)


ZERO = {
    "train_micro_batch_size_per_gpu": BATCH // 2,
    "zero_optimization": {"stage": 2},
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    "gradient_clipping": 0.0,
}
"""DeepSpeed's settings of an example."""
