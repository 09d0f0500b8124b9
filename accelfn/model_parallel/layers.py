# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism: layers that are split along "tp", and plans that name these layers."""

import difflib
import re
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F  # noqa: N812 - as everybody calls it
from torch import nn

from accelfn import World
from accelfn.errors import ArgumentError, LossError
from accelfn.model_parallel import differentiable
from accelfn.model_parallel.comparison import InputComparison
from accelfn.model_parallel.scores import Scores
from accelfn.plug import draws

# pyright: reportPrivateUsage=false

# Random numbers that differ by rank: between column and row layers, and on a rank's own
# positions.


States = list[torch.Tensor]


class PerRankRng:
    """Seeds torch's default generators by rank in a region of a loss, and restores them.

    A generator's seed identifies its region. When activations are recomputed, torch restores
    the generators. So the same numbers are drawn again, no matter which modules are recomputed.
    """

    def __init__(self, ranks: World) -> None:
        """Initialize with the ranks that draw independently."""
        self._ranks = ranks
        self._alike: dict[int, tuple[States, States]] = {}

    def begin(self) -> None:
        """Forget the regions of the last pass."""
        self._alike = {}

    def draw(self, place: str) -> None:
        """Seed this rank's generators for a region, unless a region has already seeded them."""
        first = self._generators()[0]
        if first.initial_seed() in self._alike:
            return
        # do not draw a number for the seed, because the common random numbers must not change
        before = self._states()
        content = b"".join(state.cpu().numpy().tobytes() for state in before)
        key = draws.key(content.hex(), place, self._ranks.rank)
        for generator in self._generators():
            generator.manual_seed(key)
        self._alike[first.initial_seed()] = before, self._states()

    def draw_alike(self) -> None:
        """Restore the generators whose numbers are equal on all ranks."""
        generators = self._generators()
        entry = self._alike.get(generators[0].initial_seed())
        if entry is None:
            return
        before, own_states = entry
        has_drawn = not all(map(torch.equal, own_states, self._states()))
        for generator, state in zip(generators, before, strict=True):
            generator.set_state(state)
            # otherwise layers that are called twice would draw the same numbers
            if has_drawn:
                torch.rand((), generator=generator, device=generator.device)

    def _generators(self) -> list[torch.Generator]:
        return draws.generators(self._ranks.device)

    def _states(self) -> States:
        return [generator.get_state() for generator in self._generators()]


# Split layers, as in Megatron-LM.
#
# A column layer is split by output features, and a row layer by the same features of its input.
# In the region between them, each rank computes only its own features. Ranks all-reduce at the
# end of a region in the forward pass, and at its beginning in the backward pass. Parameters are
# plain tensors that hold a rank's shard.
#
# If sequences are split between regions, a region begins with an all-gather and ends with a
# reduce-scatter.


# torch has no public name for a module's dict of parameters

_SEQUENCE = -2
"""The dim of activations that is split between regions; the last dim is the features."""


class Layers:
    """The ranks and the progress of a pass, shared by the parallel layers of one model.

    Attributes:
        ranks: the ranks along "tp".
        sequence: whether sequences are split between regions.
        looks: the comparison of layers' inputs, during the first check.
        is_whole: whether each rank currently computes with whole layers, for a comparison.
        is_checked: whether the loss was compared.
        open: the column layer of a region that no row layer has ended yet.
        split: the layer that begins split sequences; an output head gathers the sequences.
    """

    def __init__(self, ranks: World, *, sequence: bool) -> None:
        """Initialize with the ranks, and whether sequences are split."""
        self.ranks, self.sequence, self.looks = ranks, sequence, InputComparison(ranks)
        self.is_whole, self.is_checked = False, False
        self._apart = PerRankRng(ranks)
        self.begin()

    def begin(self) -> None:
        """Reset open regions before a pass."""
        self.open: str | None = None
        self.split: str | None = None
        self._entered: tuple[torch.Tensor, torch.Tensor] | None = None
        self._apart.begin()

    def enter(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return an input of a region; the backward pass sums its gradient over the ranks.

        Layers with the same input, such as query, key and value, sum its gradient only once.
        """
        entry = self._entered
        if entry is not None and entry[0] is tensor:
            return entry[1]
        if self.sequence:
            output = differentiable.gather_and_copy(tensor, _SEQUENCE, self.ranks)
        else:
            output = differentiable.copy_to_ranks(tensor, self.ranks)
        self._entered = (tensor, output)
        return output

    def leave(self, part: torch.Tensor, place: str) -> torch.Tensor:
        """Return the sum of a region's outputs over ranks, or its positions of this rank."""
        if not self.sequence:
            return differentiable.reduce_from_ranks(part, self.ranks)
        self._check_length(part, place)
        return differentiable.reduce_scatter(part, _SEQUENCE, self.ranks)

    def begin_region(self, place: str, *, training: bool) -> None:
        """Begin a region; in training, random numbers then differ by rank."""
        self.open = place
        if training:
            self._apart.draw(place)

    def end_region(self) -> None:
        """End a region; restore common random numbers, unless sequences are split."""
        self._entered = self.open = None
        if not self.sequence:
            self._apart.draw_alike()

    def begin_sequence(self, place: str, *, training: bool) -> None:
        """Begin split sequences; in training, random numbers then differ by rank."""
        self.split = place
        if training:
            self._apart.draw(place)

    def end_sequence(self) -> None:
        """End split sequences; restore common random numbers."""
        self._entered = self.split = None
        if self.sequence:
            self._apart.draw_alike()

    def gather_features(self, part: torch.Tensor) -> torch.Tensor:
        """Return the features (the last dim) of all ranks.

        In the backward pass, each rank gets the gradient of its own features.
        """
        return differentiable.gather_from_ranks(part, -1, self.ranks)

    def scatter_features(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the features, the last dim."""
        return differentiable.scatter_to_ranks(tensor, -1, self.ranks)

    def scatter(self, tensor: torch.Tensor, place: str) -> torch.Tensor:
        """Return this rank's positions of a tensor that all ranks have."""
        self._check_length(tensor, place)
        return differentiable.scatter_to_ranks(tensor, _SEQUENCE, self.ranks)

    def _check_length(self, tensor: torch.Tensor, place: str) -> None:
        if tensor.ndim < 2 or tensor.shape[_SEQUENCE] % self.ranks.size:
            msg = (
                f"af.tensor_parallel(sequence=True): the tensor of shape {tuple(tensor.shape)}"
                f" at {place!r} cannot be split into equal parts for {self.ranks.size} ranks"
                ' along "tp": the dim before the last must be the sequence. Pad the sequences'
                f" of a batch to a multiple of {self.ranks.size}."
            )
            raise LossError(msg)

    def gather_param(self, part: torch.Tensor, dim: int) -> torch.Tensor:
        """All-gather a parameter along a dim; a collective."""
        return differentiable.all_parts(part.detach(), dim, self.ranks)

    @contextmanager
    def in_one_piece(self) -> Generator[None]:
        """In a `with` block, compute with whole layers, each gathered when it is used."""
        self.is_whole = True
        try:
            yield
        finally:
            self.is_whole = False


class Parallel:
    """A layer that is split over the ranks.

    Attributes:
        cuts: the split dim of each split parameter; other parameters are whole.
        place: the layer's name in the model.
        layers: the object that all parallel layers of the model share.
    """

    cuts: ClassVar[Mapping[str, int]]
    place: str
    layers: Layers

    def now(self, name: str) -> Any:
        """Return a parameter's shard, or the whole parameter while layers are compared."""
        param: torch.Tensor | None = getattr(self, name)
        if param is None or not self.layers.is_whole or name not in self.cuts:
            return param
        return self.layers.gather_param(param, self.cuts[name])


class SelfSplittingLayer(nn.Module):
    """A layer that splits itself and is in no plan, such as a layer of Megatron-core.

    Its parameters have Megatron's attributes with the split dim.
    """

    def split(self, layers: Layers, place: str) -> None:
        """Replace the parameters by this rank's shards."""
        raise NotImplementedError

    def check(self, size: int, place: str, caller: str, *, sequence: bool) -> None:
        """Raise if the layer cannot be split over this number of ranks.

        Raises:
            ModelError: the layer cannot be split.
        """
        raise NotImplementedError


def own_layers(module: nn.Module) -> list[tuple[str, SelfSplittingLayer]]:
    """Return the layers of a model that split themselves, with their names."""
    named = module.named_modules()
    return [
        (name, layer) for name, layer in named if isinstance(layer, SelfSplittingLayer)
    ]


def own_cut(param: torch.Tensor) -> int | None:
    """Return the split dim that Megatron's attributes of a parameter define, or None."""
    fields = vars(param)
    return fields.get("partition_dim") if fields.get("tensor_model_parallel") else None


class ColumnLinear(Parallel, nn.Linear):
    """A linear layer that is split by output features, and followed by a row layer."""

    cuts = {"weight": 0, "bias": 0}  # noqa: RUF012 - all instances share it

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's word
        """Compute this rank's features and pass them to `give`, unless layers are whole."""
        weight, bias = self.now("weight"), self.now("bias")
        if self.layers.is_whole:
            return F.linear(input, weight, bias)
        return self.give(F.linear(self.layers.enter(input), weight, bias))

    def give(self, features: torch.Tensor) -> torch.Tensor:
        """Return the layer's output: this rank's features, which begin a region."""
        self.layers.begin_region(self.place, training=self.training)
        return features


class GatheredLinear(ColumnLinear):
    """A linear layer that is split by output features, and gathers its output."""

    def give(self, features: torch.Tensor) -> torch.Tensor:
        """Return the features of all ranks."""
        self.layers.end_sequence()
        return self.layers.gather_features(features)


class VocabularyLinear(ColumnLinear):
    """An output head that is split by words of the vocabulary, and returns split scores."""

    def give(self, features: torch.Tensor) -> torch.Tensor:
        """Return the scores of this rank's words."""
        self.layers.end_sequence()
        return Scores.of(features, self.layers.ranks)


class RowLinear(Parallel, nn.Linear):
    """A linear layer that is split by input features, and sums its output over the ranks."""

    cuts = {"weight": 1}  # noqa: RUF012 - all instances share it

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's word
        """Return the sum over the ranks, plus the bias."""
        layers, weight, bias = self.layers, self.now("weight"), self.now("bias")
        layers.looks.see(self.place, input, is_whole=layers.is_whole)
        if layers.is_whole:
            return F.linear(input, weight, bias)
        layers.end_region()
        total = layers.leave(F.linear(input, weight), self.place)
        if bias is None:
            return total
        if layers.sequence:  # sums the bias's gradients of all positions
            bias = differentiable.copy_to_ranks(bias, layers.ranks)
        return total + bias.to(total.dtype)


class VocabularyEmbedding(Parallel, nn.Embedding):
    """An embedding that is split by words of the vocabulary."""

    cuts = {"weight": 0}  # noqa: RUF012 - all instances share it

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's word
        """Return the vectors of all words, summed over ranks; each word is on one rank."""
        weight, layers = self.now("weight"), self.layers
        if layers.is_whole:
            return F.embedding(input, weight, self.padding_idx)
        begin, words = layers.ranks.rank * len(weight), range(len(weight))
        own_word = input - begin
        is_own = (own_word >= 0) & (own_word < len(weight))
        padding = None if self.padding_idx is None else self.padding_idx - begin
        padding = padding if padding in words else None
        vectors = F.embedding(own_word.masked_fill(~is_own, 0), weight, padding)
        vectors = layers.leave(
            vectors.masked_fill(~is_own.unsqueeze(-1), 0), self.place
        )
        if layers.sequence:
            layers.begin_sequence(self.place, training=self.training)
        return vectors


def scatter(module: nn.Module, place: str, layers: Layers) -> None:
    """Let a module's output be split by positions over the ranks."""

    def give_some(module: nn.Module, _: object, output: Any) -> Any:
        if layers.is_whole:
            return output
        output = layers.scatter(output, place)
        layers.begin_sequence(place, training=module.training)
        return output

    module.register_forward_hook(give_some)


def share_gradients(module: nn.Module, place: str, layers: Layers, word: str) -> None:
    """Sum the gradients of a module's parameters over the ranks.

    All ranks have these parameters, but use them for their own features (the word is
    "replicated") or positions ("sequence").
    """

    def lend(module: nn.Module, *_: object) -> None:
        if layers.is_whole:
            return
        if not layers.is_checked:
            _check_stands(place, layers, word)
        if not torch.is_grad_enabled():
            return
        tables = module._parameters
        params = vars(module)["_accelfn_own"] = dict(tables)
        for name, param in params.items():
            if param is not None and param.requires_grad:
                copy: Any = differentiable.copy_to_ranks(param, layers.ranks)
                tables[name] = copy

    def put_back(module: nn.Module, *_: object) -> None:
        module._parameters.update(vars(module).pop("_accelfn_own", {}))

    for submodule in module.modules():
        submodule.register_forward_pre_hook(lend)
        submodule.register_forward_hook(put_back, always_call=True)


def _check_stands(place: str, layers: Layers, word: str) -> None:
    """Raise if gradients would be summed although every rank has the full gradients.

    Raises:
        LossError: the module is not in a region, or not where sequences are split.
    """
    region, where = layers.open, "between a column and a row layer"
    if word == SEQUENCE:
        region, where = layers.split, "in a part of the model where sequences are split"
    if region is None:
        msg = (
            f"af.tensor_parallel: the plan says {word!r} for {place!r}, but this module is not"
            f" {where}. There, every rank already has the full gradient, and a sum over ranks"
            f" would be too large. Remove {place!r} from the plan."
        )
        raise LossError(msg)


LAYERS: Mapping[str, Mapping[type[nn.Module], type[Parallel]]] = {
    "column": {nn.Linear: ColumnLinear},
    "gathered": {nn.Linear: GatheredLinear},
    "row": {nn.Linear: RowLinear},
    "vocabulary": {nn.Embedding: VocabularyEmbedding, nn.Linear: VocabularyLinear},
}
"""The classes of split layers, by the plan's word and the original class."""
REPLICATED, SEQUENCE, SCATTERED = "replicated", "sequence", "scattered"
"""Words for modules that are not split. They are used on a rank's own features ("replicated")
or positions ("sequence"), or their output is split by positions ("scattered").
"""
OF_SEQUENCES = SEQUENCE, SCATTERED
WORDS = (*LAYERS, REPLICATED, *OF_SEQUENCES)
_OF_TRANSFORMERS = {
    "colwise": "column",
    "colwise_gather_output": "gathered",
    "colwise_rep": "gathered",
    "embedding_rowwise": "vocabulary",
    "replicated_with_grad_allreduce": REPLICATED,
    "rowwise": "row",
}
_EXPECTED = (
    'a dict from module names to words, such as {"blocks.*.up": "column",'
    ' "blocks.*.down": "row"}'
)
_REFUSED = ("max_norm", "sparse", "scale_grad_by_freq")
"""Options of an embedding that need all words on one rank."""


def parse_plan(plan: Any) -> dict[str, str]:
    """Check a tensor-parallel plan; return it with accelfn's words, such as "column".

    Args:
        plan: a word for each name pattern: accelfn's or Transformers' word, or torch's
        ColwiseParallel or RowwiseParallel.

    Raises:
        ArgumentError: the plan is not valid.
    """
    if not isinstance(plan, Mapping):
        msg = f"af.tensor_parallel({plan!r}): expected {_EXPECTED}."
        raise ArgumentError(msg)
    return {str(name): _word(name, value) for name, value in plan.items()}


def _word(name: object, value: Any) -> str:
    if isinstance(value, str):
        word = _OF_TRANSFORMERS.get(value, value)
        matches = difflib.get_close_matches(value, WORDS, n=1)
        hint = f" Did you mean {matches[0]!r}?" if matches else ""
    else:
        word = _word_of_torch(value)
        hint = (
            " accelfn does not support this style. For an output head, use ColwiseParallel with"
            " output_layouts=Replicate() or use_local_output=False."
        )
    if word not in WORDS:
        msg = (
            f"af.tensor_parallel: the plan says {value!r} for {name!r}; expected one of"
            f" {', '.join(WORDS)}, or torch's ColwiseParallel(), RowwiseParallel() or"
            f" SequenceParallel().{hint}"
        )
        raise ArgumentError(msg)
    return word


def _word_of_torch(style: Any) -> str | None:
    """Return accelfn's word for one of torch's parallel styles, or None."""
    from torch.distributed.tensor import Replicate, Shard  # noqa: PLC0415 - heavy
    from torch.distributed.tensor.parallel import (  # noqa: PLC0415 - heavy
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
    )

    if isinstance(style, SequenceParallel) and style.sequence_sharding == (Shard(1),):
        return SEQUENCE
    ends = (getattr(style, f"{end}_layouts", ()) for end in ("input", "output"))
    full, features = (Replicate(),), (Shard(-1),)
    key = (type(style), *map(tuple, ends), getattr(style, "use_local_output", True))
    words: dict[Any, str] = {
        (ColwiseParallel, full, features, True): "column",
        (ColwiseParallel, full, features, False): "vocabulary",
        (ColwiseParallel, full, full, True): "gathered",
        (RowwiseParallel, features, full, True): "row",
    }
    return words.get(key)


def word_of(plan: Mapping[str, str], name: str) -> str | None:
    """Return the plan's word, such as "row", for a module's name; None without a match."""
    return next((w for pattern, w in plan.items() if _matches(pattern, name)), None)


def _matches(pattern: str, name: str) -> bool:
    """Return whether a pattern matches a name; `*` matches any text between two dots."""
    parts, words = name.split("."), pattern.split(".")
    return len(parts) == len(words) and all(map(fnmatchcase, parts, words))


def planned_modules(
    plan: Mapping[str, str], module: nn.Module
) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield the modules that a plan names, each with its name and its word."""
    for name, submodule in module.named_modules():
        word = word_of(plan, name)
        if word is not None:
            yield name, submodule, word


def cut_of(plan: Mapping[str, str], param: str, meta: torch.Tensor) -> int | None:
    """Return the dim along which a plan splits a parameter, or None."""
    own_dim = own_cut(meta)
    if own_dim is not None:
        return own_dim
    place, _, key = param.rpartition(".")
    kinds = LAYERS.get(word_of(plan, place) or "", {}).values()
    dim = next((kind.cuts[key] for kind in kinds if key in kind.cuts), None)
    return dim if dim is not None and dim < meta.ndim else None


def split(plan: Mapping[str, str], module: nn.Module, layers: Layers) -> None:
    """Turn the layers in a plan into split layers. Their parameters are shards already."""
    for name, layer in own_layers(module):
        layer.split(layers, name)
    for name, layer, word in list(planned_modules(plan, module)):
        if word == SCATTERED:
            scatter(layer, name, layers)
        elif word in (REPLICATED, SEQUENCE):
            share_gradients(layer, name, layers, word)
        else:
            layer.__class__ = cast("type[nn.Module]", LAYERS[word][type(layer)])
            vars(layer).update(place=name, layers=layers)


def find_problems(
    plan: Mapping[str, str], module: nn.Module, size: int
) -> Iterator[str]:
    """Yield a message for each contradiction between a plan and a model.

    A name matches nothing, a module cannot be split as planned, or a tied parameter is split
    differently in two places.

    Args:
        plan: a plan that `parse_plan` returned.
        module: the model, with meta tensors.
        size: the number of ranks along "tp".
    """
    modules = dict(module.named_modules())
    for pattern in plan:
        if not any(_matches(pattern, name) for name in modules):
            yield _explain_name(pattern, module)
    for name, layer, word in planned_modules(plan, module):
        yield from _layer_problems(name, layer, word, size)
        if word in (REPLICATED, SEQUENCE):
            yield from _inner_problems(name, layer, word, plan)
    for name, submodule in modules.items():
        splits_itself = isinstance(submodule, SelfSplittingLayer)
        params = () if splits_itself else submodule.parameters(recurse=False)
        if any(own_cut(param) is not None for param in params):
            kind = type(submodule)
            yield (
                f"{name!r} is a {kind.__module__}.{kind.__name__} that already has only this"
                " rank's shard of its parameters. Create it with af.megatron.layers(world):"
                " then it has the full parameters, and accelfn splits them."
            )
    first: dict[int, str] = {}
    for name, param in module.named_parameters(remove_duplicate=False):
        first_name = first.setdefault(id(param), name)
        if cut_of(plan, first_name, param) != cut_of(plan, name, param):
            yield (
                f"{first_name!r} and {name!r} are the same parameter, but the plan splits it"
                " differently in the two places. Name both layers in the plan: if an output"
                ' head is tied to a "vocabulary" embedding, the head is "gathered".'
            )
    if not plan and not own_layers(module):
        yield (
            f"the plan is empty, and {type(module).__name__} has no layer of"
            f" af.megatron.layers(world), which splits itself. Pass {_EXPECTED}."
        )


def _explain_name(pattern: str, module: nn.Module) -> str:
    """Return a message about a pattern without a match, with similar names."""
    names = dict.fromkeys(
        re.sub(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)", "*", name)
        for name, layer in module.named_modules()
        if isinstance(layer, (nn.Linear, nn.Embedding))
    )
    best = difflib.get_close_matches(pattern, names, n=5, cutoff=0.3) or list(names)[:5]
    return (
        f"{type(module).__name__} has no module {pattern!r}. The closest names are"
        f" {', '.join(map(repr, best)) or 'none, as it has no linear or embedding layers'}."
    )


def _layer_problems(
    name: str, module: nn.Module, word: str, size: int
) -> Iterator[str]:
    if isinstance(module, SelfSplittingLayer):
        yield (
            f"the plan says {word!r} for {name!r}, but this is a layer of af.megatron.layers,"
            " which splits itself. Remove it from the plan."
        )
    if word not in LAYERS:
        return
    kinds = LAYERS[word]
    if type(module) not in kinds:
        yield (
            f"the plan says {word!r} for {name!r}, but only an"
            f" {' or '.join(f'nn.{kind.__name__}' for kind in kinds)} can be {word!r}, not a"
            f" subclass; this is a {type(module).__module__}.{type(module).__name__}."
        )
    wrong = [option for option in _REFUSED if getattr(module, option, None)]
    if wrong:
        yield (
            f"the embedding {name!r} has the option {', '.join(wrong)}, which needs all words"
            " on one rank. Create it without this option, or remove it from the plan."
        )
    dim = next(iter(kinds.values())).cuts["weight"]
    count = module.get_parameter("weight").shape[dim]
    if count % size:
        unit = "words" if word == "vocabulary" else "output features"
        yield (
            f"{name!r} has {count} {(unit, 'input features')[dim]}, which cannot be divided"
            f' evenly among {size} ranks along "tp". Use a multiple of {size}, or remove'
            f" {name!r} from the plan."
        )


def _inner_problems(
    name: str, module: nn.Module, word: str, plan: Mapping[str, str]
) -> Iterator[str]:
    """Yield a message for each module inside `module` whose gradients would be summed twice."""
    for inner, part in module.named_modules(prefix=name):
        role = word_of(plan, inner)
        if inner == name or (role is None and not isinstance(part, SelfSplittingLayer)):
            continue
        problem = f"is {role!r}" if role else "is split"
        yield (
            f"the plan says {word!r} for {name!r}, which includes all modules inside it, but"
            f" {inner!r} {problem}. Instead, name each module inside it that is {word!r}."
        )
