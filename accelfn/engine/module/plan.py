# SPDX-License-Identifier: Apache-2.0
"""A plan: which layers of a model are split over ranks, and how each is."""

import difflib
import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any, cast

import torch
from torch import nn

from accelfn.engine.module.parallel_layers import (
    ColumnLinear,
    GatheredLinear,
    Layers,
    Parallel,
    RowLinear,
    SplitsItself,
    VocabularyEmbedding,
    VocabularyLinear,
    own_cut,
    scatter,
    share_gradients,
)
from accelfn.errors import ArgumentError, ModelError

LAYERS: Mapping[str, Mapping[type[nn.Module], type[Parallel]]] = {
    "column": {nn.Linear: ColumnLinear},
    "gathered": {nn.Linear: GatheredLinear},
    "row": {nn.Linear: RowLinear},
    "vocabulary": {nn.Embedding: VocabularyEmbedding, nn.Linear: VocabularyLinear},
}
"""By their words, layers that are split, by what they are."""
REPLICATED, SEQUENCE, SCATTERED = "replicated", "sequence", "scattered"
"""The words for modules that all ranks have: with which each computes for its features, or
for its positions, and behind which each has its positions.
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
_REFUSED = ("max_norm", "sparse", "scale_grad_by_freq")
"""Options of an embedding that need all words on one rank."""


def checked(plan: Any) -> dict[str, str]:
    """Return a plan in accelfn's words.

    Args:
        plan: by a pattern of names, one of these words, of Transformers', or torch's
            ColwiseParallel and RowwiseParallel.

    Raises:
        ArgumentError: it is none.
    """
    if not isinstance(plan, Mapping):
        msg = (
            f"af.tensor_parallel({plan!r}): expected a word by name, such as"
            ' {"blocks.*.up": "column", "blocks.*.down": "row"}.'
        )
        raise ArgumentError(msg)
    return {str(name): _word(name, value) for name, value in plan.items()}


def check_words(plan: Mapping[str, str], *, sequence: bool) -> None:
    """Refuse words of sequences that are split where none are.

    Raises:
        ArgumentError: the plan has one.
    """
    for name, word in plan.items():
        if word in OF_SEQUENCES and not sequence:
            msg = (
                f"af.tensor_parallel: {name!r} is to be {word!r}, which is about sequences that"
                " are split between layers. Say sequence=True, or leave it out of the plan."
            )
            raise ArgumentError(msg)


def _word(name: object, value: Any) -> str:
    if isinstance(value, str):
        word = _OF_TRANSFORMERS.get(value, value)
        if word in WORDS:
            return word
        near = difflib.get_close_matches(value, WORDS, n=1)
        meant = f" Did you mean {near[0]!r}?" if near else ""
        msg = (
            f"af.tensor_parallel: {name!r} is to be {value!r}, which is no word of a plan;"
            f" they are {', '.join(WORDS)}.{meant}"
        )
        raise ArgumentError(msg)
    return _word_of_torch(name, value)


def _word_of_torch(name: object, style: Any) -> str:
    """Return the word for one of torch's styles with the options that it stands for."""
    from torch.distributed.tensor import Replicate, Shard  # noqa: PLC0415 - heavy
    from torch.distributed.tensor.parallel import (  # noqa: PLC0415 - heavy
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
    )

    if isinstance(style, SequenceParallel) and style.sequence_sharding == (Shard(1),):
        return SEQUENCE
    inside: Any = getattr(style, "input_layouts", ())
    outside: Any = getattr(style, "output_layouts", ())
    whole, features = (Replicate(),), (Shard(-1),)
    is_local = getattr(style, "use_local_output", True)
    said = (type(style), tuple(inside), tuple(outside), is_local)
    words: dict[Any, str] = {
        (ColwiseParallel, whole, features, True): "column",
        (ColwiseParallel, whole, features, False): "vocabulary",
        (ColwiseParallel, whole, whole, True): "gathered",
        (RowwiseParallel, features, whole, True): "row",
    }
    if said in words:
        return words[said]
    msg = (
        f"af.tensor_parallel: {name!r} is to be {style!r}. Of torch's styles ColwiseParallel(),"
        " RowwiseParallel() and SequenceParallel() have a word here, and of a head"
        " ColwiseParallel(output_layouts=Replicate()) and (use_local_output=False). The words"
        f" are {', '.join(WORDS)}."
    )
    raise ArgumentError(msg)


def word_of(plan: Mapping[str, str], name: str) -> str | None:
    """Return what is to become of a module; the first pattern that matches says so."""
    for pattern, word in plan.items():
        if _matches(pattern, name):
            return word
    return None


def _matches(pattern: str, name: str) -> bool:
    """Whether a name is meant: `*` stands for anything between two dots."""
    parts, words = name.split("."), pattern.split(".")
    return len(parts) == len(words) and all(map(fnmatchcase, parts, words))


def chosen(
    plan: Mapping[str, str], module: nn.Module
) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield the modules that a plan names, each with its name and its word."""
    for name, each in module.named_modules():
        word = word_of(plan, name)
        if word is not None:
            yield name, each, word


def cut_of(plan: Mapping[str, str], param: str, meta: torch.Tensor) -> int | None:
    """Return the dim at which a parameter is cut; None where it is not."""
    said = own_cut(meta)
    if said is not None:
        return said
    place, _, own = param.rpartition(".")
    kinds = LAYERS.get(word_of(plan, place) or "", {})
    dim = next(
        (each.cuts.get(own) for each in kinds.values() if own in each.cuts), None
    )
    return dim if dim is not None and dim < meta.ndim else None


def split(plan: Mapping[str, str], module: nn.Module, layers: Layers) -> None:
    """Let the layers of a model that has parts of their parameters compute with those."""
    for name, each in module.named_modules():
        if isinstance(each, SplitsItself):
            each.split(layers, name)
    for name, each, word in list(chosen(plan, module)):
        if word == SCATTERED:
            scatter(each, name, layers)
        elif word in (REPLICATED, SEQUENCE):
            share_gradients(each, name, layers, by_position=word == SEQUENCE)
        else:
            each.__class__ = cast("type[nn.Module]", LAYERS[word][type(each)])
            vars(each).update(place=name, layers=layers)


def check_model(
    plan: Mapping[str, str],
    module: nn.Module,
    size: int,
    shown: str,
    *,
    sequence: bool,
) -> None:
    """Refuse a plan that does not go with a model.

    Args:
        plan: as `checked` returns it.
        module: with meta tensors.
        size: how many ranks have a part of each layer.
        shown: who asks.
        sequence: whether sequences are split between regions.

    Raises:
        ModelError: a name matches nothing, a module cannot be split as it is to be, or a
            parameter stands in two places that are split otherwise.
    """
    names = [name for name, _ in module.named_modules()]
    for pattern in plan:
        if not any(_matches(pattern, name) for name in names):
            _refuse_name(pattern, module, shown)
    for name, each, word in chosen(plan, module):
        _check_layer(name, each, word, size, shown)
        _check_inside(name, each, word, plan, shown)
    split_themselves = 0
    for name, each in module.named_modules():
        if isinstance(each, SplitsItself):
            each.check(size, name, shown, sequence=sequence)
            split_themselves += 1
        elif any(own_cut(p) is not None for p in each.parameters(recurse=False)):
            _refuse_foreign(name, each, shown)
    if not plan and not split_themselves:
        msg = (
            f"{shown}: the plan names no layer, and {type(module).__name__} has none of"
            " af.megatron.layers(world), which need no name. Write a word by name, such as"
            ' {"blocks.*.up": "column", "blocks.*.down": "row"}.'
        )
        raise ModelError(msg)
    _check_ties(plan, module, shown)


def _refuse_foreign(name: str, module: nn.Module, shown: str) -> None:
    """Refuse a layer that says of itself that it is a part, and cannot be told of which.

    Raises:
        ModelError: always.
    """
    kind = type(module)
    msg = (
        f"{shown}: {name!r} is a {kind.__module__}.{kind.__name__}, whose parameters say that"
        " each rank has a part of them. Make it by af.megatron.layers(world), which makes it"
        " whole, and each rank's part of it here."
    )
    raise ModelError(msg)


def _refuse_name(pattern: str, module: nn.Module, shown: str) -> None:
    """Refuse a pattern, in the names of what there is.

    Raises:
        ModelError: always.
    """
    there = dict.fromkeys(
        re.sub(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)", "*", name)
        for name, each in module.named_modules()
        if isinstance(each, (nn.Linear, nn.Embedding))
    )
    near = difflib.get_close_matches(pattern, there, n=5, cutoff=0.3) or list(there)[:5]
    msg = (
        f"{shown}: {pattern!r} is no module of {type(module).__name__}. Near to it are"
        f" {', '.join(map(repr, near)) or 'no layers at all'}."
    )
    raise ModelError(msg)


def _check_layer(
    name: str, module: nn.Module, word: str, size: int, shown: str
) -> None:
    if isinstance(module, SplitsItself):
        msg = (
            f"{shown}: {name!r} is to be {word!r}, and is a layer of af.megatron.layers, which"
            " says for itself how it is split. Leave it out of the plan."
        )
        raise ModelError(msg)
    if word not in LAYERS:
        return
    kinds = LAYERS[word]
    if type(module) not in kinds:
        msg = (
            f"{shown}: {name!r} is to be {word!r}, for which it must be an"
            f" {' or '.join(f'nn.{each.__name__}' for each in kinds)}, with its own forward;"
            f" it is a {type(module).__module__}.{type(module).__name__}."
        )
        raise ModelError(msg)
    wrong = [option for option in _REFUSED if getattr(module, option, None)]
    if wrong:
        msg = (
            f"{shown}: the embedding {name!r} has {', '.join(wrong)}, which looks at all"
            " words of a batch, and a rank has some of them. Make it without, or leave it out"
            " of the plan."
        )
        raise ModelError(msg)
    dim = next(iter(kinds.values())).cuts["weight"]
    shape = tuple(module.get_parameter("weight").shape)
    if shape[dim] % size:
        what = (
            "words" if word == "vocabulary" else "output features",
            "input features",
        )
        msg = (
            f"{shown}: {name!r} has {shape[dim]} {what[dim]}, which {size} ranks along"
            ' "tp" cannot share alike. Make them a multiple, or leave it out of the plan.'
        )
        raise ModelError(msg)


def _check_inside(
    name: str, module: nn.Module, word: str, plan: Mapping[str, str], shown: str
) -> None:
    """Refuse to sum the gradients of a module in which each rank has parts of its own.

    Raises:
        ModelError: it is so, or they would be summed twice.
    """
    if word not in (REPLICATED, SEQUENCE):
        return
    for inner, each in module.named_modules(prefix=name):
        told = word_of(plan, inner)
        if inner == name or (told is None and not isinstance(each, SplitsItself)):
            continue
        what = f"is {told!r}" if told else "is split"
        msg = (
            f"{shown}: {name!r} is to be {word!r}, which is about all modules in it, and"
            f" {inner!r} {what}. Name those in it that are {word!r}, each for itself."
        )
        raise ModelError(msg)


def _check_ties(plan: Mapping[str, str], module: nn.Module, shown: str) -> None:
    """Refuse a parameter that is split in one of its places, and not so in another."""
    first: dict[int, str] = {}
    for name, param in module.named_parameters(remove_duplicate=False):
        known = first.setdefault(id(param), name)
        if cut_of(plan, known, param) != cut_of(plan, name, param):
            msg = (
                f"{shown}: {known!r} and {name!r} are one parameter, which would be split in"
                " one place and not so in the other. Name both layers: a head that is tied to"
                ' a "vocabulary" is "gathered".'
            )
            raise ModelError(msg)
