# SPDX-License-Identifier: Apache-2.0
"""The catalog: every public transform, with rules for drawing its options.

Property tests draw transforms from this catalog. They cannot test a transform without a row,
so a test fails if a row is missing.
"""

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import attrs
from hypothesis import strategies as st

import accelfn as af
from accelfn import Transform
from accelfn.errors import ArgumentError
from accelfn.plug import transform as contract

Arguments: TypeAlias = dict[str, Any]

_ONE_OF = frozenset({"engine", "reduce"})
"""Methods that at most one transform of a chain may have."""


@attrs.frozen(eq=False, repr=False)
class Row:
    """A public transform, and a strategy that draws useful options for it.

    Attributes:
        cls: the transform's class.
        arguments: the strategy that draws the options. An option that is not drawn keeps its
            default.
        value: a transform of the class that is used instead of drawn ones, or None.
        not_beside: methods of other transforms that exclude this transform from a chain.
        default_beside: for some options, methods of other transforms. If the chain has one of
            these methods, the option keeps its default.
    """

    cls: type
    arguments: st.SearchStrategy[Arguments]
    value: Transform | None = attrs.field(default=None, kw_only=True)
    not_beside: frozenset[str] = attrs.field(default=frozenset(), kw_only=True)
    default_beside: Mapping[str, frozenset[str]] = attrs.field(
        factory=dict, kw_only=True
    )

    @property
    def fields(self) -> frozenset[str]:
        """The names of the transform's methods."""
        return frozenset(field for field in contract.FIELDS if hasattr(self.cls, field))

    def transforms(
        self, other_rows: Iterable["Row"] = ()
    ) -> st.SearchStrategy[Transform]:
        """Draw this transform, for a chain with the transforms of other rows."""
        if self.value is not None:
            return st.just(self.value)
        fields = frozenset[str]().union(*(other.fields for other in other_rows))
        defaults = {name for name, away in self.default_beside.items() if away & fields}

        def create(options: Arguments) -> Transform:
            return self.cls(**{n: v for n, v in options.items() if n not in defaults})

        return self.arguments.map(create)

    @property
    def avoids(self) -> frozenset[str]:
        """The methods of other transforms that exclude this transform from a chain.

        With `value`, also the methods that its options exclude.
        """
        away = self.not_beside | (_ONE_OF & self.fields)
        for name, fields in self.default_beside.items():
            default = getattr(attrs.fields(self.cls), name).default
            if self.value is not None and getattr(self.value, name) != default:
                away |= fields
        return away

    def composes(self, other_rows: Iterable["Row"]) -> bool:
        """Whether a chain may have transforms of this row and of the other rows."""
        return not any(
            self.avoids & other.fields
            or other.avoids & self.fields
            or self.cls is other.cls
            for other in other_rows
        )

    def __repr__(self) -> str:
        """Return a text that names the transform."""
        return f"Row(af.{self.cls.__name__})"


def _options(
    mandatory: Mapping[str, st.SearchStrategy[Any]] | None = None,
    /,
    **optional: st.SearchStrategy[Any],
) -> st.SearchStrategy[Arguments]:
    return st.fixed_dictionaries(dict(mandatory or {}), optional=optional)


_COUNTS = st.integers(1, 4)
_BOUNDS = st.sampled_from([0.5, 0.125, 2.0])
_DDP: dict[str, st.SearchStrategy[Any]] = {
    "bucket_cap_mb": st.sampled_from([25, 1e-5]),
    "gradient_as_bucket_view": st.booleans(),
    "forward_sync_buffers": st.booleans(),
}

CATALOG: tuple[Row, ...] = (
    Row(af.identity, _options()),
    Row(af.shard_data, _options()),
    Row(
        af.accumulate,
        _options({"num_micro_batches": _COUNTS})
        | _options({"micro_batch_size": _COUNTS}),
    ),
    Row(
        af.wrap_ddp,
        # static_graph=True finds unused parameters itself, and torch warns if both are set
        _options(**_DDP, find_unused_parameters=st.booleans())
        | _options(**_DDP, static_graph=st.booleans()),
        not_beside=frozenset({"reduce"}),
        default_beside={"static_graph": frozenset({"value_and_grad"})},
    ),
    Row(
        af.autocast,
        _options({"precision": st.just("bf16")})
        | _options(
            {"precision": st.just("fp16")},
            init_scale=st.sampled_from([1.0, 256.0]),
            growth_factor=st.sampled_from([2.0, 4.0]),
            backoff_factor=st.sampled_from([0.5, 0.25]),
            growth_interval=st.integers(1, 3),
        ),
    ),
    Row(
        af.clip_grad_norm,
        _options(
            {"max_norm": _BOUNDS},
            norm_type=st.sampled_from([2.0, 1.0, 3.0]),
            per_group=st.booleans(),
        ),
    ),
    Row(af.clip_grad_value, _options({"max_value": _BOUNDS})),
    Row(
        af.local_sgd,
        _options(
            {"sync_every": st.integers(1, 3)},
            buffers=st.booleans(),
            opt_state=st.booleans(),
            bucket_cap_mb=st.sampled_from([25, 1e-5]),
        ),
    ),
    Row(
        af.diloco,
        _options(
            {"sync_every": st.integers(2, 3)},
            fragments=st.integers(1, 2),
            delay=st.integers(0, 1),
            mix=st.sampled_from([0.0, 0.5]),
            bits=st.sampled_from([32, 16, 8, 4]),
            bucket_cap_mb=st.sampled_from([25, 1e-5]),
        ),
        not_beside=frozenset({"eval_params"}),
    ),
    Row(af.skip_nonfinite, _options(max_consecutive=st.integers(1, 3))),
    Row(af.checkpoint_activations, _options()),
    Row(
        af.check_replicas,
        _options({"every": st.integers(1, 3)}),
        not_beside=frozenset({"reduce"}),
    ),
    Row(af.ema, _options({"decay": st.sampled_from([0.5, 0.75, 1.0])})),
    Row(
        af.reduce_lr_on_plateau,
        _options(
            factor=st.sampled_from([0.5, 0.25]),
            mode=st.just("max"),
            patience=st.integers(0, 2),
            threshold=st.sampled_from([0.0, 0.5]),
            threshold_mode=st.just("abs"),
            cooldown=st.integers(1, 2),
            min_lr=st.just(0.125),
            eps=st.just(0.0),
        ),
    ),
    Row(
        af.context_parallel,
        _options(seq_dim=st.integers(1, 3), ring=st.just(value=True)),
        not_beside=frozenset({"reduce"}),
    ),
    Row(af.sync_batchnorm, _options(), not_beside=frozenset({"reduce"})),
)


def row_of(cls: Any) -> Row:
    """Return the catalog's row of a public transform's class.

    Raises:
        ArgumentError: the class is not in the catalog, such as a class that you defined.
    """
    for row in CATALOG:
        if row.cls is cls:
            return row
    names = ", ".join(row.cls.__name__ for row in CATALOG)
    msg = (
        f"{cls!r}: accelfn can draw options only for these classes: {names}. For another class,"
        " pass a transform with the options that you test."
    )
    raise ArgumentError(msg)
