# SPDX-License-Identifier: Apache-2.0
"""One canonical instance of every public transform, and what the laws need to know of it."""

import attrs
from hypothesis import strategies as st

import accelfn as af


@attrs.frozen
class Entry:
    """A transform, how it is made neutral, and which state fields it may change.

    Attributes:
        transform: an instance whose every effect is at work.
        neutral: the same transform where it changes nothing, if there is such an argument.
        other: for each option, another instance that differs in it alone.
    """

    transform: object
    neutral: object = None
    other: dict[str, object] = attrs.field(factory=dict)

    @property
    def name(self) -> str:
        return self.transform.name


CATALOG = [
    Entry(af.identity(), neutral=af.identity()),
    Entry(af.shard_data()),
    Entry(
        af.accumulate(num_micro_batches=3),
        neutral=af.accumulate(num_micro_batches=1),
        other={
            "num_micro_batches": af.accumulate(num_micro_batches=2),
            "micro_batch_size": af.accumulate(micro_batch_size=4),
        },
    ),
    Entry(af.wrap_ddp()),
    Entry(af.autocast("bf16")),
    Entry(
        af.clip_grad_norm(0.5),
        neutral=af.clip_grad_norm(float("inf")),
        other={
            "max_norm": af.clip_grad_norm(0.25),
            "norm_type": af.clip_grad_norm(0.5, norm_type=float("inf")),
        },
    ),
    Entry(
        af.clip_grad_value(0.125),
        neutral=af.clip_grad_value(float("inf")),
        other={"max_value": af.clip_grad_value(0.0625)},
    ),
    Entry(
        af.local_sgd(sync_every=2),
        other={"sync_every": af.local_sgd(sync_every=3)},
    ),
    Entry(af.ema(0.5), other={"decay": af.ema(0.25)}),
]


def public_transforms() -> set[type]:
    """Return the classes of transforms among accelfn's public names."""
    return {
        value
        for value in vars(af).values()
        if isinstance(value, type)
        and getattr(value, "__accelfn_transform__", False)
        and value is not af.chain
    }


def stacks(max_size: int = 9) -> st.SearchStrategy[tuple[object, ...]]:
    """Draw some of the catalog's transforms, in any order, that compose."""
    values = [entry.transform for entry in CATALOG]

    def composable(order: list[object]) -> tuple[object, ...]:
        # wrap_ddp reduces gradients, local_sgd says they are not: one of the two
        both = [t for t in order if isinstance(t, (af.wrap_ddp, af.local_sgd))]
        return tuple(t for t in order if t not in both[1:])

    return st.lists(
        st.sampled_from(values), max_size=max_size, unique_by=lambda t: t.name
    ).map(composable)
