# SPDX-License-Identifier: Apache-2.0
"""A user's transform can do all that accelfn's own can, by public names.

Each in `users_own` is one of accelfn's, written again: it trains as the original does, bit by
bit on dyadic data, and keeps the laws. Together they have every field.
"""

import re
from pathlib import Path

import pytest
import torch

import accelfn as af
from accelfn.testing import assert_equivalent, check_transform
from tests.internals import FIELDS
from tests.laws import users_own as own

MEAN = af.chain(af.shard_data(), af.wrap_ddp())
PAIRS = {
    "shard_data": (af.chain(own.Shard(), af.wrap_ddp()), MEAN),
    "accumulate": (
        own.Accumulate(3, name="accumulate"),
        af.accumulate(num_micro_batches=3),
    ),
    "ema": (own.Ema(0.5, name="ema"), af.ema(0.5)),
    "local_sgd": (
        af.chain(af.shard_data(), own.LocalSgd(2, name="local_sgd")),
        af.chain(af.shard_data(), af.local_sgd(sync_every=2)),
    ),
    "ema where ranks are apart": (
        af.chain(
            af.shard_data(), own.Ema(0.5, name="ema"), own.LocalSgd(2, name="local_sgd")
        ),
        af.chain(af.shard_data(), af.ema(0.5), af.local_sgd(sync_every=2)),
    ),
    "reduce": (af.chain(own.Shard(), own.Mean()), MEAN),
    "plateau": (
        own.Plateau(0.5, patience=0, name="plateau"),
        af.reduce_lr_on_plateau(0.5, patience=0),
    ),
    "skip_nonfinite": (own.SkipNonFinite(name="skip_nonfinite"), af.skip_nonfinite()),
    "autocast": (own.Autocast(), af.autocast("bf16")),
    "checkpoint_activations": (own.Recompute(), af.checkpoint_activations()),
    "wrap_fsdp": (
        af.chain(own.Shard(), own.Parts()),
        af.chain(af.shard_data(), af.wrap_fsdp()),
    ),
}
USERS = [
    each
    for each in vars(own).values()
    if isinstance(each, type) and getattr(each, "__accelfn_transform__", False)
]


def test_they_have_every_field_by_public_names():
    """They import nothing of accelfn but its public names."""
    assert {n for each in USERS for n in FIELDS if hasattr(each, n)} == set(FIELDS)
    text = Path(own.__file__).read_text()
    assert re.findall(r"^(?:import|from) (accelfn.*)", text, re.MULTILINE) == [
        "accelfn as af"
    ]
    attributes = set(re.findall(r"\.(_[a-z]\w+)", text))
    assert attributes <= set(re.findall(r"def (_\w+)", text))


@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_each_trains_as_the_original_does(pair):
    users, originals = pair
    assert_equivalent(users, originals, sizes=(1, 2, 4))


LAWFUL = [
    *(own.Accumulate(2), own.Ema(0.5), own.LocalSgd(2), own.Mean(), own.Recompute()),
    *(own.Plateau(0.5, patience=0), own.SkipNonFinite()),
]


@pytest.mark.slow
@pytest.mark.parametrize("transform", LAWFUL, ids=repr)
def test_each_keeps_the_laws(transform):
    check_transform(transform, sizes=(2,))


def test_what_not_all_may_evaluate_is_brought_together():
    """Where ranks are apart, what another transform evaluates is averaged, in either order."""
    apart, average = own.LocalSgd(9, name="local_sgd"), own.Ema(0.5, name="ema")
    one = af.chain(af.shard_data(), apart, average)
    assert_equivalent(one, af.chain(af.shard_data(), average, apart), sizes=(2,))


def test_two_that_recompute_are_refused():
    with pytest.raises(af.errors.CompositionError, match="may select the same modules"):
        af.chain(af.checkpoint_activations(), own.Recompute())
    with pytest.raises(af.errors.CompositionError, match="may select the same modules"):
        af.chain(own.Recompute(), af.checkpoint_activations(torch.nn.Linear))
