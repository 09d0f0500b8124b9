# SPDX-License-Identifier: Apache-2.0
"""One example of every public transform, with facts that the property tests need about it."""

from contextlib import suppress

import attrs
from hypothesis import find
from hypothesis import strategies as st

import accelfn as af
from tests.facts import public
from tests.internals import CATALOG as ROWS

IDENTITY_OPTIONS = {
    af.identity: {},
    af.accumulate: {"num_micro_batches": 1},
    af.clip_grad_norm: {"max_norm": float("inf")},
    af.clip_grad_value: {"max_value": float("inf")},
    af.skip_nonfinite: {},
    af.checkpoint_activations: {},
    af.check_replicas: {"every": 1},
    af.reduce_lr_on_plateau: {},
    af.context_parallel: {},
}
"""For some transforms, options that make them change nothing."""
NOT_DRAWN = frozenset(
    {
        *(af.compile, af.compress_grads, af.optimizer_in_backward, af.schedule_free),
        *(af.wrap_fsdp, af.wrap_deepspeed, af.tensor_parallel),
    }
)
"""Public transforms without a row in the catalog of `accelfn.testing`.

`compile` takes seconds. `schedule_free` needs a special optimizer, and `compress_grads` needs
`wrap_ddp`. `optimizer_in_backward` can be combined with few other transforms. `wrap_deepspeed`
needs real processes. Under `wrap_fsdp` and `tensor_parallel`, a state has shards, and tests that
compare full tensors would have to gather them.
"""


def public_transforms() -> set[type]:
    """Return the classes of accelfn's public transforms, without `chain` and `NOT_DRAWN`."""
    return public() - NOT_DRAWN


@attrs.frozen
class Entry:
    """A transform, how it is made neutral, and others that differ from it in one option.

    Attributes:
        transform: an instance whose every effect is at work.
        other: for each option, another instance that differs in it alone.
    """

    transform: object
    other: dict[str, object] = attrs.field(factory=dict)

    @property
    def neutral(self) -> object:
        """The same transform where it changes nothing, if there is such an argument."""
        kind = type(self.transform)
        return kind(**IDENTITY_OPTIONS[kind]) if kind in IDENTITY_OPTIONS else None

    @property
    def name(self) -> str:
        return self.transform.name


CATALOG = [
    Entry(af.identity()),
    Entry(af.shard_data()),
    Entry(
        af.accumulate(num_micro_batches=3),
        other={
            "num_micro_batches": af.accumulate(num_micro_batches=2),
            "micro_batch_size": af.accumulate(micro_batch_size=4),
        },
    ),
    Entry(af.wrap_ddp()),
    Entry(af.autocast("bf16")),
    Entry(
        af.clip_grad_norm(0.5),
        other={
            "max_norm": af.clip_grad_norm(0.25),
            "norm_type": af.clip_grad_norm(0.5, norm_type=float("inf")),
            "per_group": af.clip_grad_norm(0.5, per_group=True),
        },
    ),
    Entry(af.clip_grad_value(0.125), other={"max_value": af.clip_grad_value(0.0625)}),
    Entry(af.local_sgd(sync_every=2), other={"sync_every": af.local_sgd(sync_every=3)}),
    Entry(
        af.diloco(sync_every=2, bits=8),
        other={
            "sync_every": af.diloco(sync_every=3, bits=8),
            "mix": af.diloco(sync_every=2, bits=8, mix=0.5),
            "delay": af.diloco(sync_every=2, bits=8, delay=1),
            "fragments": af.diloco(sync_every=2, bits=8, fragments=2),
        },
    ),
    Entry(af.skip_nonfinite()),
    Entry(af.checkpoint_activations()),
    Entry(af.check_replicas(every=2)),
    Entry(af.reduce_lr_on_plateau(0.5, patience=0)),
    Entry(af.ema(0.5), other={"decay": af.ema(0.75)}),
    Entry(af.sync_batchnorm()),
    Entry(af.context_parallel()),
]
CATALOG += [
    Entry(find(row.transforms(), lambda _: True))
    for row in ROWS
    if not any(isinstance(entry.transform, row.cls) for entry in CATALOG)
]
"""A transform without an entry above has the first that its row draws."""


def stacks(max_size: int = 9) -> st.SearchStrategy[tuple[object, ...]]:
    """Draw some of the catalog's transforms, in any order, that compose."""
    values = [entry.transform for entry in CATALOG]

    def composable(order: list[object]) -> tuple[object, ...]:
        kept = af.chain()
        for transform in order:
            with suppress(af.errors.CompositionError):
                kept = af.chain(kept, transform)
        return tuple(kept)

    return st.lists(
        st.sampled_from(values), max_size=max_size, unique_by=lambda t: t.name
    ).map(composable)
