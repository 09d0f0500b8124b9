# SPDX-License-Identifier: Apache-2.0
"""Keys differ where their parts do, in the bits that torch's generator keeps.

`key` and `fold` are not public: the public `af.fork_rng` cannot draw from so many keys in a
test's time, and a collision would show nowhere else.
"""

import pytest
import torch

from tests.internals import devices, draws

LOW = (1 << 32) - 1


def test_keys_of_different_parts_differ():
    """Parts of another value, kind or division have other keys."""
    parts = [(1,), ("1",), (1, 1), (11,), ("a", "b"), ("ab",), ("a;", "b"), (2**70,)]
    assert len({draws.key(*each) for each in parts}) == len(parts)


def test_folded_keys_differ_in_the_low_bits():
    """A run's updates and micro-batches have keys that differ in 32 bits, nearly all."""
    parent = draws.key(0, "state", "loss", 0)
    found = {
        draws.fold(draws.fold(parent, step), part) & LOW
        for step in range(5000)
        for part in range(4)
    }
    assert len(found) >= 20_000 - 2


def test_fold_takes_any_number():
    """Negative and large numbers give 64-bit keys."""
    for number in (-1, 0, 2**63, 2**100):
        assert 0 <= draws.fold(draws.key(0), number) < 2**64


class Unseedable:
    """A device's generator that is lost."""

    def get_state(self):
        return torch.zeros(0)

    def set_state(self, state):
        pass

    def manual_seed(self, seed):
        raise RuntimeError(seed)


def test_a_device_that_cannot_be_seeded_leaves_the_cpu_as_it_was(monkeypatch):
    """The generator that was seeded before it is put back."""
    monkeypatch.setattr(devices, "generators", lambda _: (Unseedable(),))
    before = torch.get_rng_state()
    with pytest.raises(RuntimeError), draws.seeded(1, torch.device("cuda")):
        pass
    assert torch.equal(before, torch.get_rng_state())
