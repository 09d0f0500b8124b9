# SPDX-License-Identifier: Apache-2.0
"""What the laws of split layers train: models that attend, whose layers have a plan."""

from functools import partial
from itertools import islice
from math import prod
from typing import Any

import attrs
import torch
import torch.nn.functional as F  # noqa: N812 - as everybody calls it
from hypothesis import strategies as st
from torch import nn

import accelfn as af
from accelfn.testing import simulate
from tests.laws.long_texts import EPS
from tests.laws.worlds import close_means
from tests.strategies import differences, tensors

WIDTH, HEADS, INNER, LETTERS, LENGTH = 8, 4, 12, 8, 4
Batch = dict[str, torch.Tensor]
PLAN = {
    "tokens": "vocabulary",
    "blocks.*.query": "column",
    "blocks.*.both": "column",
    "blocks.*.of_heads": "replicated",
    "blocks.*.out": "row",
    "blocks.*.up": "column",
    "blocks.*.down": "row",
    "head": "gathered",
}
"""How all of it is split."""
FEW = {"blocks.0.up": "column", "blocks.0.down": "row"}
"""How one pair of layers is."""
SCORES = {**PLAN, "head": "vocabulary"}
"""All of it, and no rank has the scores of all letters."""
SEQUENCE = {**SCORES, "places": "scattered", "blocks.*.norm": "sequence"}
"""All of it, and sequences between the layers."""


class Block(nn.Module):
    """Attention, and two layers behind it, each added to what comes in."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.query, self.both = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.of_heads = nn.RMSNorm(WIDTH // HEADS, eps=1e-2)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.inside, self.outside = nn.Dropout(dropout), nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        query = self._by_head(self.query(y))
        # a head's keys stand beside its values, so that a rank has both
        both = self.both(y).unflatten(-1, (-1, 2, WIDTH // HEADS)).transpose(1, 2)
        key, value = both.unbind(-2)
        attended = F.scaled_dot_product_attention(
            self.of_heads(query), self.of_heads(key), value, is_causal=True
        )
        x = x + self.outside(self.out(attended.transpose(1, 2).flatten(2)))
        return x + self.down(self.inside(torch.tanh(self.up(x))))

    @staticmethod
    def _by_head(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)


class Speaker(nn.Module):
    """Predicts a token for each position, and remembers the mean of what it saw."""

    def __init__(
        self,
        dtype: torch.dtype,
        *,
        tied: bool,
        dropout: float,
        padding: int | None = LETTERS - 2,
        frozen: tuple[str, ...] = (),
    ) -> None:
        super().__init__()
        self.places = nn.Identity()
        self.tokens = nn.Embedding(LETTERS, WIDTH, padding_idx=padding)
        self.blocks = nn.ModuleList([Block(dropout)])
        self.head = nn.Linear(WIDTH, LETTERS, bias=not tied)
        self.scale = nn.Parameter(torch.empty(()))
        self.reset_parameters()
        if tied:
            self.head.weight = self.tokens.weight
        self.register_buffer("seen", torch.zeros(()))
        self.to(dtype)
        freeze(self, frozen)

    def reset_parameters(self) -> None:
        """Set what is this module's own."""
        nn.init.constant_(self.scale, 1.5)

    def forward(self, batch: Batch) -> torch.Tensor:
        if self.training:
            self.seen.lerp_(batch["places"].mean(), 0.5)
        x = self.tokens(batch["tokens"]) + self.places(batch["places"].unsqueeze(-1))
        for block in self.blocks:
            x = block(x)
        return self.head(x) * self.scale


def freeze(net: nn.Module, names: tuple[str, ...]) -> None:
    """Let some parameters be trained by nobody."""
    for name in names:
        net.get_parameter(name).requires_grad_(requires_grad=False)


def loss_of_tokens(net: nn.Module, batch: Batch) -> af.Loss:
    """Return the sum over tokens that count, of which there may be none."""
    due, weights = batch["due"], batch["weights"]
    each = F.cross_entropy(net(batch).transpose(1, 2), due, reduction="none")
    total = (each * weights).sum()
    return af.Loss(total, weights.sum(), nll=(total, weights.sum()))


@attrs.frozen
class Speech:
    """A training of a few updates.

    Attributes:
        n: texts.
        batch_size: texts an update.
        plan: how layers are split.
        tied: whether the head is the embedding.
        micro: parts of a rank's share.
        behind: further transforms.
        dropout: how often features are dropped.
        padding: the token whose vector is not trained.
        frozen: parameters that are not.
    """

    n: int
    batch_size: int
    plan: dict[str, str]
    tied: bool = False
    micro: int = 1
    behind: tuple[object, ...] = ()
    dropout: float = 0.0
    padding: int | None = LETTERS - 2
    frozen: tuple[str, ...] = ("blocks.0.both.bias",)
    dtype: torch.dtype = torch.float64
    seed: int = 0

    def data(self) -> af.Data:
        """Return tokens, what is due at each, how much each counts, and its place."""
        draw = torch.Generator().manual_seed(self.seed)
        text = torch.randint(LETTERS, (self.n, LENGTH + 1), generator=draw)
        weights = torch.randint(0, 3, (self.n, LENGTH), generator=draw)
        places = torch.linspace(0, 1, LENGTH, dtype=self.dtype).expand(self.n, -1)
        rows = {
            "tokens": text[:, :-1],
            "due": text[:, 1:],
            "weights": weights.to(self.dtype),
            "places": places,
        }
        samples = [{name: rows[name][i] for name in rows} for i in range(len(text))]
        return af.Data(samples, global_batch_size=self.batch_size)

    def model(self, world: af.World) -> Any:
        """Return what makes the model."""
        del world
        return partial(
            Speaker,
            self.dtype,
            tied=self.tied,
            dropout=self.dropout,
            padding=self.padding,
            frozen=self.frozen,
        )

    def state(self, world: af.World, *engine: object, **options: Any) -> af.TrainState:
        """Return the state before the first update."""
        micro = af.accumulate(num_micro_batches=self.micro)
        return af.TrainState.create(
            model=self.model(world),
            optimizer=partial(torch.optim.AdamW, lr=0.02, eps=EPS[self.dtype]),
            data=self.data(),
            setup=af.chain(af.shard_data(), *engine, micro, *self.behind),
            world=world,
            seed=self.seed,
            **options,
        )


@attrs.frozen
class Lying:
    """How a model lies over ranks: along which axes, by which transforms, and if in a ring."""

    axes: dict[str, int]
    engine: tuple[object, ...] = ()
    ring: bool = attrs.field(default=False, kw_only=True)

    def setup(self, plan: dict[str, str]) -> tuple[object, ...]:
        """Return the transforms."""
        sequence = "sequence" in plan.values()
        split = (af.tensor_parallel(plan, sequence=sequence),)
        split = split if "tp" in self.axes else ()
        read = (af.context_parallel(ring=self.ring),) if "cp" in self.axes else ()
        return *split, *self.engine, *read

    def on_ranks(self, fn: Any) -> list[Any]:
        """Return what a function of a world gives on each rank."""
        size = prod(self.axes.values())
        if size == 1:
            return [fn(af.World.single(device="cpu"))]
        return list(simulate(size, fn, axes=self.axes))


Found = dict[str, torch.Tensor]
Seen = tuple[Found, list[dict[str, float]]]


def stepped(
    state: af.TrainState, updates: int, loss: Any = loss_of_tokens
) -> tuple[af.TrainState, list[dict[str, float]]]:
    """Return a state after more updates, and the metrics of each."""
    step, means = af.make_step(loss), []
    for batch in islice(af.batches(state), updates):
        state, metrics = step(state, batch)
        means.append(metrics.all_reduce_mean(state.world))
    return state, means


def seen(state: af.TrainState, speech: Speech, loss: Any = loss_of_tokens) -> Seen:
    """Return what a state has after three updates, metrics, and an evaluation."""
    state, means = stepped(state, 3, loss)
    means.append(af.evaluate(state, speech.data(), loss_of_tokens))
    return tensors(state), means


def check_near(alone: Seen, ranks: list[Seen], dtype: torch.dtype) -> None:
    """Check that ranks found what one rank found."""
    expected, means = alone
    within = 1e-13 if dtype is torch.float64 else 1e-6
    for found, others in ranks:
        del found["buffers.seen"]  # where ranks see less, it is of less
        whole = {name: value for name, value in expected.items() if name in found}
        assert differences(whole, found, within=within) == []
        if dtype is torch.float64:
            assert all(close_means(*pair) for pair in zip(means, others, strict=True))


FSDP = (
    (af.wrap_fsdp(),),
    (af.wrap_fsdp(Block, reshard_after_forward=False, keep_grads="sharded"),),
)
DDP = (af.wrap_ddp(),)
LYING = [
    *(Lying({"tp": size}) for size in (2, 4)),
    *(Lying({"dp_shard": 2, "tp": 2}, engine) for engine in (DDP, *FSDP)),
    *(Lying({"dp_shard": 3, "tp": 2}, engine) for engine in (DDP, FSDP[0])),
    *(Lying({"dp_shard": 2, "tp": 4}, engine) for engine in FSDP),
    *(Lying({"dp_replicate": 2, "tp": 2}, DDP),),
    *(Lying({"dp_replicate": 2, "dp_shard": 2, "tp": 2}, e) for e in (DDP, FSDP[0])),
    *(Lying({"cp": 2, "tp": 2}, engine) for engine in (DDP, FSDP[0])),
    *(Lying({"dp_shard": 2, "cp": 2, "tp": 2}, engine) for engine in (DDP, *FSDP)),
]
UNSPLIT = [
    Lying({"dp_shard": 1}),
    *(Lying({"dp_shard": size}, DDP) for size in (2, 3)),
    *(Lying({"dp_shard": size}, FSDP[0]) for size in (2, 3, 4)),
    Lying({"dp_replicate": 2, "dp_shard": 2}, FSDP[0]),
]
BESIDE = (
    *(af.clip_grad_norm(0.3), af.clip_grad_norm(0.3, norm_type=3.0), af.ema(0.5)),
    *(af.clip_grad_value(0.1), af.checkpoint_activations(Block)),
)


FROZEN = (
    (),
    ("blocks.0.both.bias",),
    ("blocks.0.up.weight", "blocks.0.out.weight"),
    ("tokens.weight", "blocks.0.of_heads.weight"),
)
"""Parameters that are not trained: a bias, weights between whose biases are, all of a layer."""


@st.composite
def speeches(draw: st.DrawFn, **fixed: Any) -> Speech:
    """Draw a training."""
    behind = st.lists(st.sampled_from(BESIDE), unique_by=lambda each: each.name)
    drawn = {
        "n": draw(st.integers(1, 9)),
        "batch_size": draw(st.integers(1, 6)),
        "plan": draw(st.sampled_from([PLAN, SCORES, SEQUENCE, SEQUENCE, FEW])),
        "tied": draw(st.booleans()),
        "micro": draw(st.integers(1, 4)),
        "behind": tuple(draw(behind)),
        "seed": draw(st.integers(0, 9)),
        "frozen": draw(st.sampled_from(FROZEN)),
    }
    return Speech(**{**drawn, **fixed})
