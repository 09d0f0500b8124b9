# SPDX-License-Identifier: Apache-2.0
"""What the laws of split sequences train: models that attend, on texts of tokens."""

from functools import partial
from typing import Any

import attrs
import torch
import torch.nn.functional as F  # noqa: N812 - as everybody calls it
from hypothesis import strategies as st
from torch import nn

import accelfn as af

FEATURES, LETTERS, LONGEST = 3, 5, 16
"""Features of a head, kinds of tokens, and how many positions there are."""
EPS = {torch.float64: 1e-3, torch.float32: 0.1}
"""Of Adam: a gradient that is 0, as of biases of keys, is rounding, which it divides by this."""
Batch = dict[str, torch.Tensor]


class Attending(nn.Module):
    """Attention, added to what comes in."""

    def __init__(self, heads, shared_by, mask, scale, dropped) -> None:
        super().__init__()
        width = heads * FEATURES
        self.scale, self.dropped = scale, dropped
        self.heads, self.kind, self.groups = heads, mask, heads // shared_by
        self.norm = nn.LayerNorm(width)
        self.query = nn.Linear(width, width)
        self.both = nn.Linear(width, 2 * self.groups * FEATURES)
        self.out = nn.Linear(width, width)
        shape = (heads,) if mask == "by head" else ()
        allowed = torch.rand(*shape, LONGEST, LONGEST) < 0.5
        self.register_buffer("allowed", allowed | torch.eye(LONGEST, dtype=torch.bool))
        if mask == "learned":
            self.bias = nn.Parameter(torch.randn(heads, LONGEST, LONGEST))

    def forward(self, x: torch.Tensor, length: int) -> torch.Tensor:
        y = self.norm(x)
        key, value = self._by_head(self.both(y), 2 * self.groups).chunk(2, 1)
        masks = {"any": "allowed", "by head": "allowed", "learned": "bias"}
        mask = getattr(self, masks[self.kind]) if self.kind in masks else None
        attended = F.scaled_dot_product_attention(
            self._by_head(self.query(y), self.heads),
            key,
            value,
            None if mask is None else mask[..., :length, :length],
            dropout_p=self.dropped if self.training else 0.0,
            is_causal=self.kind == "causal",
            scale=self.scale,
            enable_gqa=self.groups < self.heads,
        )
        return x + self.out(attended.transpose(1, 2).flatten(2))

    @staticmethod
    def _by_head(x: torch.Tensor, heads: int) -> torch.Tensor:
        return x.unflatten(-1, (heads, FEATURES)).transpose(1, 2)


class Reader(nn.Module):
    """Predicts a token for each position."""

    def __init__(self, text: "Text") -> None:
        super().__init__()
        width = text.heads * FEATURES
        self.tokens = nn.Embedding(LETTERS, width)
        self.places = nn.Embedding(LONGEST, width)
        options = (text.heads, text.shared_by, text.mask, text.scale, text.dropped)
        self.layers = nn.ModuleList(Attending(*options) for _ in range(2))
        self.head = nn.Linear(width, LETTERS, bias=False)
        self.to(text.dtype)

    def forward(self, batch: Batch) -> torch.Tensor:
        x = self.tokens(batch["tokens"]) + self.places(batch["places"])
        length = int(batch["length"].max())
        for layer in self.layers:
            x = layer(x, length)
        return self.head(x)


def loss_of_tokens(net: nn.Module, batch: Batch) -> af.Loss:
    """Return the sum over tokens that count, of which there may be none."""
    logits, due, weights = net(batch), batch["due"], batch["weights"]
    each = F.cross_entropy(logits.transpose(1, 2), due, reduction="none")
    hit = (logits.argmax(-1) == due).to(each) * weights
    return af.Loss(
        (each * weights).sum(), weights.sum(), hit=(hit.sum(), weights.sum())
    )


@attrs.frozen
class Text:
    """A training of a few updates on texts.

    Attributes:
        n: texts.
        batch_size: texts an update.
        length: positions of each.
        heads: of each attention.
        shared_by: heads of queries that share one of keys.
        mask: which positions see which: "none", "causal", "any", or any "by head"; or how much
            of them, as is "learned" by head.
        scale: what products of queries and keys are multiplied by; None is torch's own.
        dropped: which share of what is attended to in training: none or all, for which
            nothing must be drawn alike.
        micro: parts of a rank's share.
        ring: whether keys and values go round, so that nothing is dropped.
        behind: further transforms.
    """

    n: int
    batch_size: int
    length: int
    heads: int
    shared_by: int = 1
    mask: str = "causal"
    scale: float | None = None
    dropped: float = 0.0
    micro: int = 1
    ring: bool = False
    behind: tuple[object, ...] = ()
    dtype: torch.dtype = torch.float64
    seed: int = 0

    @property
    def sharing(self) -> object:
        """Return the transform that splits it."""
        return af.context_parallel(ring=self.ring)

    def data(self) -> af.Data:
        """Return tokens, what is due at each, how much each counts, and its place."""
        draw = torch.Generator().manual_seed(self.seed)
        text = torch.randint(LETTERS, (self.n, self.length + 1), generator=draw)
        weights = torch.randint(0, 3, (self.n, self.length), generator=draw)
        places = torch.arange(self.length).expand(self.n, -1)
        rows = {
            "tokens": text[:, :-1],
            "due": text[:, 1:],
            "weights": weights.to(self.dtype),
            "places": places,
            "length": torch.full((self.n,), self.length),
        }
        return af.Data(_Rows(rows), global_batch_size=self.batch_size)

    def state(self, world: af.World, *engine: object) -> af.TrainState:
        """Return the state before the first update."""
        model = partial(Reader, self)
        optimizer = partial(torch.optim.AdamW, lr=0.02, eps=EPS[self.dtype])
        micro = af.accumulate(num_micro_batches=self.micro)
        return af.TrainState.create(
            model=model,
            optimizer=optimizer,
            data=self.data(),
            setup=af.chain(af.shard_data(), *engine, micro, *self.behind),
            world=world,
            seed=self.seed,
        )


@attrs.frozen
class _Rows(torch.utils.data.Dataset[Any]):
    rows: dict[str, torch.Tensor]

    def __len__(self) -> int:
        return len(self.rows["tokens"])

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {name: rows[index] for name, rows in self.rows.items()}


AXES = [
    *({"cp": size} for size in (2, 2, 3, 4)),
    {"dp_shard": 2, "cp": 2},
    {"dp_shard": 3, "cp": 2},
    {"dp_shard": 2, "cp": 3},
    {"dp_replicate": 2, "cp": 2},
    {"dp_replicate": 2, "dp_shard": 2, "cp": 2},
]
engines = st.one_of(
    st.builds(
        af.wrap_fsdp,
        st.sampled_from([None, Attending]),
        reshard_after_forward=st.booleans(),
        keep_grads=st.sampled_from(["whole", "sharded"]),
    ),
    st.just(af.wrap_ddp()),
)
BESIDE = (
    *(af.clip_grad_norm(0.3), af.ema(0.5), af.checkpoint_activations(Attending)),
    af.checkpoint_activations(),
)


@st.composite
def texts(draw: st.DrawFn, ranks: int, **fixed: Any) -> Text:
    """Draw a training that so many ranks along "cp" can share."""
    ring = fixed["ring"] if "ring" in fixed else draw(st.booleans())
    keys = (
        draw(st.integers(1, 3))
        if ring
        else ranks * draw(st.integers(1, 4 // ranks + 1))
    )
    lengths = [2 * ranks, 4 * ranks] if ring else [ranks * n for n in range(1, 5)]
    shared_by = draw(st.sampled_from([1, 1, 2]))
    behind = st.lists(st.sampled_from(BESIDE), unique_by=lambda each: each.name)
    drawn = {
        "n": draw(st.integers(1, 9)),
        "batch_size": draw(st.integers(1, 6)),
        "length": draw(st.sampled_from(lengths)),
        "heads": keys * shared_by,
        "shared_by": shared_by,
        "mask": draw(st.sampled_from(["none", "causal", "any", "by head", "learned"])),
        "scale": draw(st.sampled_from([None, 0.25, 2.0])),
        "dropped": 0.0 if ring else draw(st.sampled_from([0.0, 0.0, 0.0, 1.0])),
        "micro": draw(st.integers(1, 3)),
        "ring": ring,
        "behind": tuple(draw(behind)),
        "seed": draw(st.integers(0, 9)),
    }
    return Text(**{**drawn, **fixed})
