# SPDX-License-Identifier: Apache-2.0
"""What a transform tells of itself, and what it cannot stand beside.

Class attributes of a transform, or properties where its options decide; accelfn's own have
them as users' have, and nothing asks for another's type or options.

| attribute | says |
| --- | --- |
| `tells` | facts, of the table below, each with a value that is not false |
| `refuses` | by a field's or a fact's name, the sentence in which `chain` refuses another \
transform that has it; `{other!r}` in it is that transform, `{told}` what it tells |
| `needs` | by a field's or a fact's name, the sentence in which a state refuses a setup \
in which no transform has it |
| `without` | fields that its options leave it without |
| `gives_up` | laws that it breaks on purpose, each with its reason |
"""

import difflib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, cast

from accelfn.base.signatures import annotations_of
from accelfn.definition.fields import FIELDS, has_field
from accelfn.errors import ArgumentError, CompositionError

FACTS: Mapping[str, str] = {
    "apart": "ranks hold different parameters between averages; it follows from"
    " `gives_up` of `replicas_agree`, and from `reduce = None`",
    "buckets": "gradients cross the ranks in DistributedDataParallel's buckets",
    "by_rank": "names of entries of its slot that differ by rank",
    "clips": "the bound of the gradients' global 2-norm, for an engine that holds gradients itself",
    "compiles": "the loss is compiled",
    "compression": "a function of a state that returns how buckets cross the ranks",
    "computes_in": "the dtype in which torch computes the loss's products",
    "draws_nothing": "its methods draw no random numbers, so none are made ready",
    "eight_bits": "linear layers multiply in 8 bits",
    "finds_unused": "parameters may take no part in the loss, by an option that is named",
    "judges_finite": "it looks at the gradients, so that a loss may be infinite",
    "micro_batches": "a function of a batch that returns its parts, each of which has its"
    " backward pass",
    "offloads": "parts of parameters lie in the host's memory, and are computed with elsewhere",
    "one_graph": "the loss is traced as one graph",
    "owes": "a function of a state and its slot that returns whether ranks hold other"
    " parameters until `finalize` is called",
    "recomputes": "modules run again in the backward pass",
    "sees_skips": "its `after_update` is called after a skipped update, too",
    "skips_alone": "its `grads` does no more than leave out updates that are not finite, for an"
    " engine that does so itself",
    "skips_on_device": "its `after_update` is as well called once a device knows of a skip",
    "small_buckets": "buckets are smaller than 1 MiB",
    "splits_layers": 'a function of a module and a world that gives ranks along "tp" parts of its'
    " layers",
    "splits_sequences": 'ranks along "cp" take parts of the same sequences',
    "stays": "gradients stay on their rank, or in its copy of the model; it follows"
    " from `reduce = None`",
    "steps_in_backward": "the optimizer steps while the backward pass runs",
    "within": "gradients are averaged along this axis alone",
    "whole_gradients": "until the last micro-batch each rank has all of every gradient",
}
"""What each fact says of the transform that tells it."""

ATTRIBUTES = ("tells", "refuses", "needs", "without", "gives_up")


def facts_of(transform: Any) -> dict[str, Any]:
    """Return what a transform tells, and what follows from its other attributes."""
    told = {name: value for name, value in told_by(transform, "tells").items() if value}
    stays = has_field(transform, "reduce") and transform.reduce is None
    if stays:
        told["stays"] = True
    if stays or "replicas_agree" in told_by(transform, "gives_up"):
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
        ArgumentError: it does; or one of a transform's is annotated as an option.
    """
    annotations = annotations_of(cls)
    options = {name for name, kind in annotations.items() if not _is_of_class(kind)}
    for name in sorted(options & {*ATTRIBUTES, *FIELDS}):
        msg = (
            f"{cls.__name__}.{name}: a transform's own word cannot be an option. Annotate it"
            " as ClassVar, or not at all, if that is meant; or call the option otherwise."
        )
        raise ArgumentError(msg)
    for name, value in vars(cls).items():
        plain = not name.startswith("_") and name not in options and not callable(value)
        if plain and name not in (*ATTRIBUTES, *FIELDS):
            _refuse_near(f"{cls.__name__}.{name}", name, ATTRIBUTES)


def _is_of_class(annotation: object) -> bool:
    """Whether an annotation is a ClassVar, which may be a text."""
    return "ClassVar" in str(annotation)


def check_told(transform: Any) -> None:
    """Raise unless what a transform tells can be read: names that are known, and sentences.

    Raises:
        ArgumentError: one looks like another, misspelt, or is no name or sentence.
    """
    shown = repr(transform)
    for name in ("tells", "needs", "refuses"):
        known = (*FACTS, *FIELDS) if name != "tells" else tuple(FACTS)
        for fact, value in told_by(transform, name).items():
            if fact not in known:
                _refuse_near(f"{shown}.{name}[{fact!r}]", fact, known)
            if name != "tells" and not isinstance(value, str):
                msg = f"{shown}.{name}[{fact!r}] is {value!r}; expected a sentence."
                raise ArgumentError(msg)
    left = transform.without if hasattr(type(transform), "without") else ()
    for field in (left,) if isinstance(left, str) else left:
        if isinstance(left, str) or field not in FIELDS:
            msg = (
                f"{shown}.without is {left!r}; expected a tuple of {', '.join(FIELDS)}."
            )
            raise ArgumentError(msg)
    entries = told_by(transform, "tells").get("by_rank") or ()
    if isinstance(entries, str) or not all(isinstance(each, str) for each in entries):
        msg = f"{shown}.tells['by_rank'] is {entries!r}; expected a tuple of names."
        raise ArgumentError(msg)


def _refuse_near(what: str, name: str, known: Sequence[str]) -> None:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.85)
    if near:
        msg = f"{what}: did you mean {near[0]!r}? Known are {', '.join(known)}."
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
        refuses = told_by(each, "refuses")
        for other in others if refuses else ():
            for name, sentence in refuses.items():
                told = says[id(other)].get(name)
                if told:
                    said = sentence.replace("{other!r}", "{other}")
                    said = said.replace("{told}", str(told))
                    said = said.replace("{other}", repr(other))
                    msg = f"chain: {each!r} {said}"
                    raise CompositionError(msg)


def check_needs(transforms: Iterable[Any], there: Collection[str]) -> None:
    """Raise where a transform is applied without another that it is nothing without.

    Raises:
        CompositionError: in the words of the one that needs it.
    """
    for each in transforms:
        for name, sentence in told_by(each, "needs").items():
            if name not in there:
                msg = f"{each!r} {sentence}"
                raise CompositionError(msg)


def told_by(transform: Any, name: str) -> Mapping[str, Any]:
    """Return an attribute of a transform that is a mapping; none is an empty one.

    Raises:
        ArgumentError: it is none.
    """
    # asked of the class, for a property that raises must not be taken for none
    found = getattr(transform, name) if hasattr(type(transform), name) else {}
    if isinstance(found, Mapping):
        return cast("Mapping[str, Any]", found)
    msg = f"{transform!r}.{name} is {found!r}; expected a mapping by name."
    raise ArgumentError(msg)
