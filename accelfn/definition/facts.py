# SPDX-License-Identifier: Apache-2.0
"""What a transform tells of itself, and what it cannot stand beside.

Class attributes of a transform, or properties where its options decide; accelfn's own have
them as users' have, and nothing asks for another's type or options.

| attribute | says |
| --- | --- |
| `tells` | facts, of the table below, each with a value that is not false |
| `refuses` | by a field's or a fact's name, the sentence in which `chain` refuses another \
transform that has it; `{other!r}` in it is that transform, `{told}` what it tells |
| `needs` | by a fact, the sentence in which a state refuses a setup where none tells it |
| `without` | fields that its options leave it without |
| `gives_up` | laws that it breaks on purpose, each with its reason |
"""

import difflib
import inspect
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, cast

from accelfn.errors import ArgumentError, CompositionError

FACTS: Mapping[str, str] = {
    "apart": "ranks hold different parameters between averages; it follows from"
    " `gives_up` of `replicas_agree`, and from `reduce = None`",
    "buckets": "gradients cross the ranks in DistributedDataParallel's buckets",
    "by_rank": "names of entries of its slot that differ by rank",
    "compiles": "the loss is compiled",
    "compression": "a function of a state that returns how buckets cross the ranks",
    "draws_nothing": "its methods draw no random numbers, so no stream of them is made",
    "finds_unused": "parameters may take no part in the loss, by an option that is named",
    "judges_finite": "it looks at the gradients, so that a loss may be infinite",
    "micro_batches": "a function of a batch that returns its parts, each of which has its"
    " backward pass",
    "one_graph": "the loss is traced as one graph",
    "recomputes": "modules run again in the backward pass",
    "sees_skips": "its `after_update` is called after a skipped update, too",
    "skips_on_device": "its `after_update` is as well called once a device knows of a skip",
    "small_buckets": "buckets are smaller than 1 MiB",
    "steps_in_backward": "the optimizer steps while the backward pass runs",
}
"""What each fact says of the transform that tells it."""

ATTRIBUTES = ("tells", "refuses", "needs", "without", "gives_up")


def facts_of(transform: Any) -> dict[str, Any]:
    """Return what a transform tells, and what follows from its other attributes."""
    told = {
        name: value for name, value in _mapping(transform, "tells").items() if value
    }
    stays = getattr(transform, "reduce", transform) is None
    if stays or "replicas_agree" in _mapping(transform, "gives_up"):
        told["apart"] = True
    return told


def by_rank(transforms: Iterable[Any]) -> frozenset[tuple[str, str]]:
    """Return the entries of slots that differ by rank, as names of slots and in them."""
    return frozenset(
        (each.name, entry)
        for each in transforms
        for entry in facts_of(each).get("by_rank", ())
    )


def check_attributes(cls: type) -> None:
    """Raise where an attribute of a class looks like one of a transform's, misspelt.

    Raises:
        ArgumentError: it does, or names a fact that looks like another.
    """
    options = inspect.get_annotations(cls)
    for name, value in vars(cls).items():
        plain = not name.startswith("_") and name not in options and not callable(value)
        if plain and name not in ATTRIBUTES:
            _refuse_near(f"{cls.__name__}.{name}", name, ATTRIBUTES)
        if name in ("tells", "needs") and isinstance(value, Mapping):
            for fact in cast("Mapping[str, Any]", value).keys() - FACTS.keys():
                _refuse_near(f"{cls.__name__}.{name}[{fact!r}]", fact, tuple(FACTS))


def _refuse_near(what: str, name: str, known: Sequence[str]) -> None:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
    if near:
        msg = f"{what}: did you mean {near[0]!r}? A transform has {', '.join(known)}."
        raise ArgumentError(msg)


def check_together(
    transforms: Sequence[Any], says: Mapping[Any, Mapping[str, Any]]
) -> None:
    """Raise where a transform cannot stand beside the others.

    Args:
        transforms: of a chain.
        says: of each by its id, fields and facts by name.

    Raises:
        CompositionError: in the words of the one that refuses.
    """
    for each in transforms:
        others = [other for other in transforms if other is not each]
        refuses = _mapping(each, "refuses")
        for other in others if refuses else ():
            for name, sentence in refuses.items():
                told = says[id(other)].get(name)
                if told:
                    said = sentence.replace("{other!r}", repr(other))
                    said = said.replace("{told}", str(told))
                    msg = f"chain: {each!r} {said}"
                    raise CompositionError(msg)


def check_needs(transforms: Iterable[Any], facts: Collection[str]) -> None:
    """Raise where a transform is applied without another that it is nothing without.

    Raises:
        CompositionError: in the words of the one that needs it.
    """
    for each in transforms:
        for name, sentence in _mapping(each, "needs").items():
            if name not in facts:
                msg = f"{each!r} {sentence}"
                raise CompositionError(msg)


def _mapping(transform: Any, name: str) -> Mapping[str, Any]:
    found = getattr(transform, name, {})
    if isinstance(found, Mapping):
        return cast("Mapping[str, Any]", found)
    msg = f"{transform!r}.{name} is {found!r}; expected a mapping by name."
    raise ArgumentError(msg)
