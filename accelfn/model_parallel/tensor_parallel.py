# SPDX-License-Identifier: Apache-2.0
"""Split the layers of a model over the ranks along "tp" (tensor parallelism)."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeAlias

import attrs
import torch
from torch import nn

from accelfn import Loss, TrainState, Update, World, transform
from accelfn.errors import ArgumentError, BatchError, Error, LossError, ModelError
from accelfn.model_parallel import comparison
from accelfn.model_parallel.differentiable import LABEL
from accelfn.model_parallel.layers import (
    OF_SEQUENCES,
    Layers,
    cut_of,
    find_problems,
    own_layers,
    parse_plan,
    split,
)
from accelfn.model_parallel.scores import gather_scores
from accelfn.plug import arguments, check_elements, devices, draws

LossFunction: TypeAlias = Callable[..., Any]

_NO_PLAN: Mapping[str, str] = {}
"""The default plan; layers of `af.megatron.layers` need no plan."""
_KEPT = "_accelfn_layers"
"""The attribute of the engine's module that holds its `Layers`."""
_NOTHING = 1e-6
"""The absolute tolerance, which matters for losses near 0."""
_WAY = (
    'Between a "column" and a "row" layer, a tensor has only this rank\'s features. Do not'
    " write their number into the model, but use view(..., -1, head_dim). Name every layer of"
    " an attention or feed-forward block in the plan."
)

_AFTER_SPLIT = (
    "After {!r} each rank has only its part of each sequence. In the plan, mark a module whose"
    ' output is added there, such as position embeddings, as "scattered". Mark the output head as'
    ' "vocabulary" or "gathered": it gathers the sequences.'
)


@transform
class tensor_parallel:
    """Split layers over the ranks along "tp" (tensor parallelism, as in Megatron-LM).

    The ranks along "tp" get the same samples. The plan gives one of these words to a layer:

    - "column": a linear layer that is split by output features. Attention and feed-forward
      blocks begin with such layers.
    - "row": a linear layer that is split by input features. It ends a block, and sums its
      output over the ranks. Between column and row layers, each rank computes only its own
      heads and features.
    - "vocabulary": an embedding or an output head, split by words of the vocabulary. Cross
      entropy is computed from split scores; every other function gets the gathered scores of
      all words.
    - "gathered": a column layer that gathers its output features on all ranks.
    - "replicated": an unsplit module between a column and a row layer, such as a norm of each
      head. Its gradients are summed over the ranks.

    Modules that the plan does not name are the same on all ranks.

    With `sequence=True` (sequence parallelism), each rank has only some positions of the
    activations between such blocks: from a "vocabulary" embedding, or a module with the word
    "scattered", to the output head. Modules with parameters in between, such as norms, have the
    word "sequence": their gradients are summed over the ranks.

    You write the model for one process. Code between the layers must read the number of
    features from its inputs, as `view(..., -1, head_dim)` does. To find mistakes, accelfn
    compares the first loss with the loss of whole layers, on one sample. It also compares the
    first gradients of unsplit parameters between ranks.

    In a world without "tp" nothing changes.

    Acts on: layout, loss; init (checks the plan).

    Args:
        plan: words by module name. In a name, `*` matches any text between two dots. The words
        of Transformers' plans, and torch's ColwiseParallel and RowwiseParallel also work.
        Layers of `af.megatron.layers(world)` split themselves, and must not be in the plan.
        sequence: also split sequences between the blocks.

    Law:
        Parameters, optimizer state, weights and metrics equal those of one process, up to
        rounding. Unsplit parameters stay equal on all ranks, bitwise if torch is deterministic.
        Dropout masks differ between ranks where each rank has its own features or positions,
        and are equal elsewhere. A checkpoint can be loaded into any other layout, bitwise.

    Cost:
        With n ranks along "tp", each rank holds 1/n of the split parameters, of their optimizer
        state and of the activations between layers. A pair of a column and a row layer
        all-reduces its output in the forward pass, and the gradient of its input in the
        backward pass: each time a rank sends 2 (n - 1) / n of the bytes. With `sequence=True`
        it sends as many bytes, and holds 1/n of all other activations. Cross entropy of a
        "vocabulary" head sends three numbers per token. Once per engine, two forward passes run
        on one sample, and the gradients of unsplit parameters are summed.

    Raises:
        ArgumentError: the plan is not a mapping, or has an unknown word.
        CompositionError: when composed with `local_sgd`, `compile`, `compress_grads`,
        `optimizer_in_backward`, fp8, or another tensor_parallel.
        ModelError: when the state is created, a name matches no module; a layer is not a plain
        nn.Linear or nn.Embedding; "tp" does not divide its features; or a tied parameter is
        split in only one of its places.
        OptimizerError: when the state is created, the optimizer is not elementwise.
        LossError: at a step, the loss differs from the loss of whole layers, or ranks have
        different gradients of an unsplit parameter.
        BatchError: at a step, the ranks along "tp" got different batches.

    References:
        Shoeybi et al. 2019, "Megatron-LM: Training Multi-Billion Parameter Language Models
        Using Model Parallelism"; Korthikanti et al. 2022, "Reducing Activation Recomputation in
        Large Transformer Models".

    Example:
        >>> tensor_parallel({"blocks.*.up": "column", "blocks.*.down": "row"})
        af.tensor_parallel({'blocks.*.up': 'column', 'blocks.*.down': 'row'})
    """

    refuses: ClassVar[Mapping[str, str]] = {
        "apart": "splits one model over the ranks, but under {other!r} each rank trains its"
        " own model. Leave out one of the two.",
        "compiles": "runs all-reduces inside the model, and {other!r} cannot trace them. Leave"
        " out one of the two.",
        "compression": "splits parameters over ranks, but {other!r} works only with whole"
        " parameters. Leave out one of the two.",
        "eight_bits": "and {other!r} would both replace the linear layers. Leave out one of"
        " the two.",
        "splits_layers": "and {other!r} would both split the layers. Leave out one of the two.",
        "steps_in_backward": "compares the gradients of unsplit parameters between ranks, but"
        " {other!r} frees each gradient as soon as it is complete. Leave out one of the two.",
    }
    plan: Mapping[str, str] = attrs.field(default=_NO_PLAN, converter=parse_plan)
    sequence: bool = arguments.option(default=False, validator=arguments.truth())

    def __attrs_post_init__(self) -> None:
        """Raise if the plan has words that need `sequence=True`."""
        for name, word in self.plan.items():
            if word in OF_SEQUENCES and not self.sequence:
                msg = (
                    f"af.tensor_parallel: the plan says {word!r} for {name!r}, which needs"
                    " sequences that are split between layers. Pass sequence=True, or remove it"
                    " from the plan."
                )
                raise ArgumentError(msg)

    @property
    def tells(self) -> Mapping[str, Any]:
        """Tell other transforms which function splits the layers."""
        return {"draws_nothing": True, "splits_layers": self._split}

    def layout(
        self, name: str, meta: torch.Tensor, axes: Mapping[str, int]
    ) -> Mapping[str, int] | None:
        """Shard the parameters of layers in the plan along "tp"."""
        del axes
        dim = cut_of(self.plan, name, meta)
        return None if dim is None else {"tp": dim}

    def init(self, state: TrainState) -> None:
        """Raise if the plan does not fit the model, or if the optimizer is not elementwise."""
        size, caller = state.world.along("tp").size, f"{self!r}"
        module = state.definition.skeleton.module
        for problem in find_problems(self.plan, module, size):
            msg = f"{caller}: {problem}"
            raise ModelError(msg)
        for name, layer in own_layers(module):
            layer.check(size, name, caller, sequence=self.sequence)
        check_elements(state, caller, dims=(0, 1))

    def loss(
        self, loss_fn: LossFunction, slot: None, update: Update
    ) -> tuple[LossFunction, None]:
        """Wrap the loss: compare it once with whole layers, and gather scores in its result."""

        def loss_of_layers(model: nn.Module, batch: Any, *extras: Any) -> Any:
            layers: Layers | None = vars(model).get(_KEPT)
            if layers is None:
                return loss_fn(model, batch, *extras)
            if not layers.is_checked:
                _check(layers, loss_fn, model, batch, *extras)
                layers.is_checked = True
            layers.begin()
            return gather_scores(loss_fn(model, batch, *extras))

        loss_of_layers.__qualname__ = arguments.qualname(loss_fn)
        return loss_of_layers, slot

    def _split(self, module: nn.Module, world: World) -> None:
        ranks = world.along("tp")
        if ranks.size > 1:
            layers = vars(module)[_KEPT] = Layers(ranks, sequence=self.sequence)
            split(self.plan, module, layers)


def _check(
    layers: Layers, loss_fn: LossFunction, model: nn.Module, batch: Any, *extras: Any
) -> None:
    """Compare the loss of split layers with the loss of whole layers, on the first sample.

    All ranks run equally many forward passes, because a pass may gather parameters of all
    ranks.

    Raises:
        BatchError: the ranks have different batches.
        LossError: the two losses differ.
    """
    ranks, looks, name = layers.ranks, layers.looks, arguments.qualname(loss_fn)
    first, trouble, part = comparison.first_of(batch), None, None
    looks.begin()
    try:
        with (
            comparison.preserve_model(model, ranks.device),
            comparison.Coarsest() as coarsest,
        ):
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
    numbers = _number(in_one), _number(part), float(differing is not None)
    rows, table = comparison.gather_numbers(numbers, ranks, ranks.whole, label=LABEL)
    rows = devices.on_host(rows)
    advice = _WAY if split is None else f"{_WAY} {_AFTER_SPLIT.format(split)}"
    distance = (rows[:, 0] - rows[:, 1]).abs()
    tolerance = (coarsest.tolerance * rows[:, :2].abs().amax(1)).clamp(min=_NOTHING)
    kind, problem = LossError, None
    if trouble is not None:
        problem = f"{name} fails with split layers: {trouble}. {advice}"
    elif len(table[:, 0].nan_to_num().unique()) > 1:
        kind = BatchError
        problem = (
            f"{comparison.different_batches('tp', table[:, 0])} If the batches are equal, your"
            " loss reads parameters directly, for example by model.parameters(), and there each"
            " rank has only its shard."
        )
    elif bool(rows[:, 2].any()):
        where = repr(differing) if differing else "a row layer on another rank"
        problem = (
            f"{name} gives another result with split layers: the input of {where} is not this"
            f" rank's slice of the input that the unsplit layer gets. {_WAY}"
        )
    elif still_open is not None:
        problem = (
            f'no "row" layer follows the "column" layer {still_open!r}, so the model continues'
            ' with only this rank\'s features. In the plan, write "gathered" for this layer, or'
            ' "row" for the layer that uses its output.'
        )
    elif split is not None:
        problem = f"{name} is computed from this rank's part of the sequences. {advice}"
    elif bool((distance > tolerance).any()):
        problem = (
            f"{name} is {float(table[0, 0]):.6g} with whole layers, but {float(table[0, 1]):.6g}"
            f" with split layers. {_WAY}"
        )
    if problem is not None:
        msg = f"af.tensor_parallel: {problem}"
        raise kind(msg) from trouble


def _number(loss: Any) -> Any:
    """Return a loss as a number to compare; 0 if the loss is not a number."""
    value = loss.total if isinstance(loss, Loss) else loss
    is_one = isinstance(value, torch.Tensor) and value.numel() == 1
    if is_one:
        return value.reshape(())
    return value if isinstance(value, (int, float)) else 0.0
