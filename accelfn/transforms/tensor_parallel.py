# SPDX-License-Identifier: Apache-2.0
"""Split the layers of a model over the ranks along "tp"."""

from collections.abc import Mapping
from typing import Any, ClassVar

import attrs
import torch
from torch import nn

from accelfn.base import draws
from accelfn.base.arguments import option, qualname, truth
from accelfn.base.devices import on_host
from accelfn.collectives.packed import all_gather_list
from accelfn.definition.transform import transform
from accelfn.engine.doctor import Coarsest, first_of, preserve_model
from accelfn.engine.optimizer import check_elements
from accelfn.engine.runner import LossFunction
from accelfn.engine.tensor_parallel import (
    Layers,
    check_model,
    check_words,
    cut_of,
    parse_plan,
    split,
)
from accelfn.engine.vocabulary import gather_scores
from accelfn.errors import BatchError, Error, LossError
from accelfn.state.results import Loss
from accelfn.state.state import TrainState
from accelfn.state.update import Update
from accelfn.world import World

_NO_PLAN: Mapping[str, str] = {}
"""The default; layers of `af.megatron.layers` need no plan."""
_KEPT = "_accelfn_layers"
"""The attribute of the engine's module with its `Layers`."""
_FAR, _COARSE = 1e-3, 0.1
"""Relative tolerances of the split loss in 32 bits and in 16 bits."""
_NOTHING = 1e-6
"""The absolute tolerance, for losses near 0."""
_WAY = (
    "Between a column and a row layer a rank has some of the features: let the model take"
    " their number from what it is given, as view(..., -1, head_dim) does, and name all the"
    " layers of such a part in the plan."
)


@transform
class tensor_parallel:
    """Split layers over the ranks along "tp" (tensor parallelism, as in Megatron-LM).

    The ranks along "tp" take the same samples. The plan gives layers one of these words. A
    "column" layer is split by output features, a "row" layer by input features: attention and
    feed-forward blocks begin with a column and end with a row layer, and between them each rank
    computes only its own heads and features. A row layer ends with a sum over the ranks. A
    "vocabulary" layer is an embedding or an output head split by words; cross entropy is
    computed on split scores, and every other function gets the gathered scores of all words. A
    "gathered" layer is a column layer that gathers its features on all ranks. A "replicated"
    module between a column and a row layer, such as a norm of each head, exists on all ranks,
    and its gradients are summed. Modules that the plan does not name are the same on all ranks.

    With sequence=True (sequence parallelism) each rank has its own positions of activations
    between such blocks: from a "vocabulary" embedding, or a "scattered" module, to the head.
    Modules with parameters there, such as norms, are "sequence": their gradients are summed.

    You write the model for one process. Code between the layers must take the number of
    features from its inputs, as `view(..., -1, head_dim)` does. To find mistakes, accelfn
    compares the first loss with the loss of whole layers, on one sample, and the first
    gradients of unsplit parameters between ranks.

    In a world without "tp" nothing changes.

    Acts on: layout, loss; init (checks the plan).

    Args:
        plan: words by module name: "column", "row", "vocabulary", "gathered", "replicated". In
        a name, `*` matches anything between two dots. The words of Transformers' plans and
        torch's ColwiseParallel and RowwiseParallel also work. Layers of
        `af.megatron.layers(world)` split themselves, and must not be in the plan.

    Law:
        Parameters, optimizer state, weights and metrics are those of one process, up to
        rounding. Unsplit parameters stay equal on all ranks, bitwise if torch is deterministic.
        Dropout masks differ by rank between a column and a row layer, and on a rank's own
        positions; elsewhere they are equal on all ranks. A checkpoint of one layout loads into
        any other, bitwise.

    Cost:
        With n ranks along "tp", each rank holds 1/n of the split parameters, of their optimizer
        state and of the activations between layers. A pair of column and row layers all-reduces
        its output in the forward pass and its input's gradient in the backward pass: 2 (n - 1)
        / n of their bytes each; with sequence=True as many bytes, and 1/n of all other
        activations. Cross entropy of a "vocabulary" head sends three numbers per token. Once
        per engine, two forward passes on one sample, and a sum of the gradients of unsplit
        parameters.

    Raises:
        ArgumentError: the plan is not a mapping, or has an unknown word.
        CompositionError: when composed with `local_sgd`, `compile`, `compress_grads`,
        `optimizer_in_backward`, fp8, or another tensor_parallel.
        ModelError: when the state is created, a name matches no module; a layer is not a plain
        nn.Linear or nn.Embedding; "tp" does not divide its features; or a tied parameter is
        split in only one of its places.
        OptimizerError: when the state is created, the optimizer is not elementwise.
        LossError: at a step, the loss differs from the loss of whole layers, or ranks have
        different gradients of a shared parameter.
        BatchError: at a step, the ranks along "tp" got different batches.

    References:
        Shoeybi et al. 2019, "Megatron-LM: Training Multi-Billion Parameter Language Models
        Using Model Parallelism"; Korthikanti et al. 2022, "Reducing Activation Recomputation
        in Large Transformer Models".

    Example:
        >>> tensor_parallel({"blocks.*.up": "column", "blocks.*.down": "row"})
        af.tensor_parallel({'blocks.*.up': 'column', 'blocks.*.down': 'row'})
    """

    refuses: ClassVar[Mapping[str, str]] = {
        "apart": "has one model that is split over the ranks, and under {other!r} each rank"
        " has its own model. Leave out one of the two.",
        "compiles": "has ranks add up in the midst of a model, which {other!r} cannot trace."
        " Leave out one of the two.",
        "compression": "has parts of parameters, and {other!r} remembers what it left out of"
        " whole ones. Leave out one of the two.",
        "eight_bits": "has layers of its own, and {other!r} would put others in their place."
        " Leave out one of the two.",
        "splits_layers": "and {other!r} would split a part once more. Leave out one.",
        "steps_in_backward": "looks at the gradients of what all ranks have, and {other!r}"
        " frees each as soon as it is there. Leave out one of the two.",
    }
    plan: Mapping[str, str] = attrs.field(default=_NO_PLAN, converter=parse_plan)
    sequence: bool = option(default=False, validator=truth())

    def __attrs_post_init__(self) -> None:
        """Reject words that need sequence=True."""
        check_words(self.plan, sequence=self.sequence)

    @property
    def tells(self) -> Mapping[str, Any]:
        """The function that splits layers."""
        return {"draws_nothing": True, "splits_layers": self._split}

    def layout(
        self, name: str, meta: torch.Tensor, axes: Mapping[str, int]
    ) -> Mapping[str, int] | None:
        """Shard the parameters of planned layers along tp."""
        del axes
        dim = cut_of(self.plan, name, meta)
        return None if dim is None else {"tp": dim}

    def init(self, state: TrainState) -> None:
        """Reject models and optimizers that splitting would change."""
        size = state.world.along("tp").size
        module = state.definition.skeleton.module
        check_model(self.plan, module, size, f"{self!r}", sequence=self.sequence)
        check_elements(state, f"{self!r}", dims=(0, 1))

    def loss(
        self, loss_fn: LossFunction, slot: None, update: Update
    ) -> tuple[LossFunction, None]:
        """Compare the first loss with the loss of whole layers."""

        def loss_of_layers(model: nn.Module, batch: Any, *extras: Any) -> Any:
            layers: Layers | None = vars(model).get(_KEPT)
            if layers is None:
                return loss_fn(model, batch, *extras)
            if not layers.is_checked:
                _check(layers, loss_fn, model, batch, *extras)
                layers.is_checked = True
            layers.begin()
            return gather_scores(loss_fn(model, batch, *extras))

        loss_of_layers.__qualname__ = qualname(loss_fn)
        return loss_of_layers, slot

    def _split(self, module: nn.Module, world: World) -> None:
        ranks = world.along("tp")
        if ranks.size > 1:
            layers = vars(module)[_KEPT] = Layers(ranks, sequence=self.sequence)
            split(self.plan, module, layers)


def _check(
    layers: Layers, loss_fn: LossFunction, model: nn.Module, batch: Any, *extras: Any
) -> None:
    """Compare a loss with the loss of whole layers, on the first sample.

    All ranks run as many passes: other ranks may gather units with them.

    Raises:
        BatchError: the ranks have different batches.
        LossError: the two losses differ.
    """
    ranks, looks, name = layers.ranks, layers.looks, qualname(loss_fn)
    first, trouble, part = first_of(batch), None, None
    looks.begin()
    try:
        with preserve_model(model, ranks.device), Coarsest() as coarsest:
            with layers.in_one_piece(), draws.seeded(0, ranks.device):
                in_one = loss_fn(model, first, *extras)
            layers.begin()
            try:
                with draws.seeded(0, ranks.device):
                    part = gather_scores(loss_fn(model, first, *extras))
            except (RuntimeError, ValueError, IndexError) as error:
                if isinstance(error, Error):
                    raise
                trouble = error
    finally:
        still_open, split, differing = layers.open, layers.split, looks.end()
    numbers = (_total(in_one), _total(part), float(differing is not None))
    own_row = torch.stack([n.to(ranks.device) for n in map(_number, numbers)])
    rows = on_host(
        torch.stack(all_gather_list(own_row, ranks.whole, label="tensor_parallel"))
    )
    begin = ranks.whole.rank - ranks.rank  # "tp" is the innermost axis
    table = rows[begin : begin + ranks.size]
    advice = _WAY
    if split is not None:
        advice += (
            f" Behind {split!r} each rank has its part of a sequence: what is added to that, as"
            ' embeddings of positions, is to be "scattered", and the head "vocabulary" or'
            ' "gathered", which puts sequences together.'
        )
    if trouble is not None:
        msg = f"af.tensor_parallel: {name} fails where layers are split: {trouble}. {advice}"
        raise LossError(msg) from trouble
    if not torch.equal(
        table[:, 0].nan_to_num(), table[:1, 0].nan_to_num().expand(len(table))
    ):
        msg = (
            'af.tensor_parallel: the ranks along "tp" were given different batches: the loss'
            f" of the first sample is {table[:, 0].tolist()}. They share each sample: read by"
            " af.batches(state), or by world.batch.rank. Or the loss reads parameters beside"
            " the model's forward pass, as model.parameters(), where each rank has its part."
        )
        raise BatchError(msg)
    if bool(rows[:, 2].any()):
        where = differing or "a row layer, on another rank,"
        msg = (
            f"af.tensor_parallel: {name} differs from the loss of full layers: {where!r} does not"
            f" get this rank's features of what it is given in one piece. {_WAY}"
        )
        raise LossError(msg)
    if still_open is not None:
        msg = (
            f"af.tensor_parallel: {still_open!r} is a column layer, and no row layer follows"
            " it, so each rank continues with only a part of its features. Make it"
            ' "gathered", or the'
            ' layer that takes them "row".'
        )
        raise LossError(msg)
    if split is not None:
        msg = f"af.tensor_parallel: {name} is computed of parts of sequences. {advice}"
        raise LossError(msg)
    far = _COARSE if coarsest.eps > _FAR else _FAR
    distance = (rows[:, 0] - rows[:, 1]).abs()
    if bool((distance > (far * rows[:, :2].abs().amax(1)).clamp(min=_NOTHING)).any()):
        msg = (
            f"af.tensor_parallel: {name} is {float(table[0, 0]):.6g} of whole layers and"
            f" {float(table[0, 1]):.6g} of parts. {_WAY}"
        )
        raise LossError(msg)


def _total(loss: Any) -> Any:
    return loss.total if isinstance(loss, Loss) else loss


def _number(value: Any) -> torch.Tensor:
    """Return a number to compare; 0 for values that are not numbers."""
    is_number = isinstance(value, (int, float)) or (
        isinstance(value, torch.Tensor) and value.numel() == 1
    )
    number = torch.as_tensor(value if is_number else 0.0, dtype=torch.float64)
    return number.reshape(())
