# SPDX-License-Identifier: Apache-2.0
"""`Breakdown`: where a step's time goes, by the spans that accelfn leaves in a trace."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import attrs
from torch.autograd import DeviceType

from accelfn.errors import ArgumentError

_STEP = "ProfilerStep"
_HALVES = ("value_and_grad", "apply_grads", "step")
_PARTS = ("data", "forward", "backward", "reduce", "transforms", "optimizer")
_OWN, _OUTSIDE = "accelfn itself", "outside"


@attrs.frozen(kw_only=True)
class Breakdown:
    """Where the time of a step went: means over the steps of a profile, in seconds.

    Each moment counts for the innermost span that it lies in, so the parts add up to `whole`.

    Attributes:
        num_steps: how many steps were recorded.
        whole: from the end of one step to that of the next.
        parts: seconds by part, in the order of a step: "data", "forward", "backward",
            "reduce", "transforms", "optimizer", "accelfn itself", which is what a step does
            between these, and "outside", which is what the loop does beside steps.
        transforms: seconds of the part of that name, by `name.field` of the transform.
    """

    num_steps: int
    whole: float
    parts: Mapping[str, float]
    transforms: Mapping[str, float]

    def __str__(self) -> str:
        """Show a table: a line for each part that took time, and its share of the whole."""
        rows = [("step", self.whole)]
        for name, seconds in self.parts.items():
            if seconds:
                rows.append((f"  {name}", seconds))
            if name == "transforms":
                rows.extend((f"    {each}", s) for each, s in self.transforms.items())
        width = max(len(name) for name, _ in rows)
        lines = [
            f"{name:{width}}{1000 * seconds:11.3f} ms{100 * seconds / self.whole:6.1f} %"
            for name, seconds in rows
        ]
        return "\n".join(lines)


def breakdown(events: Iterable[Any]) -> Breakdown:
    """Return where the time of the steps among a profiler's events went.

    Raises:
        ArgumentError: no step is among them.
    """
    spans = [each for each in events if each.device_type == DeviceType.CPU]
    spans = [each for each in spans if each.name.startswith((_STEP, "accelfn "))]
    # an outer span begins before those in it, or ends after them
    spans.sort(key=lambda each: (each.time_range.start, -each.time_range.end))
    microseconds = defaultdict[str, float](float)
    open_spans: list[Any] = []
    num_steps, whole = 0, 0.0
    for span in spans:
        start, length = span.time_range.start, span.time_range.elapsed_us()
        while open_spans and open_spans[-1].time_range.end <= start:
            open_spans.pop()
        if span.name.startswith(_STEP):
            num_steps, whole = num_steps + 1, whole + length
        elif not open_spans:  # of no step
            continue
        else:
            microseconds[_part(open_spans[-1].name)] -= length
        microseconds[_part(span.name)] += length
        open_spans.append(span)
    if not num_steps:
        msg = (
            "profiler.breakdown(): no spans were recorded. Let activities= have"
            " torch.profiler.ProfilerActivity.CPU."
        )
        raise ArgumentError(msg)
    seconds = {name: total / num_steps / 1e6 for name, total in microseconds.items()}
    transforms = {name: s for name, s in seconds.items() if "." in name}
    seconds["transforms"] = sum(transforms.values())
    return Breakdown(
        num_steps=num_steps,
        whole=whole / num_steps / 1e6,
        parts={name: seconds.get(name, 0.0) for name in (*_PARTS, _OWN, _OUTSIDE)},
        transforms=transforms,
    )


def _part(name: str) -> str:
    """Return what the time of a span counts for; a transform's has a dot in it."""
    if name.startswith(_STEP):
        return _OUTSIDE
    _, word, *owner = name.split(" ", 2)
    if word in _HALVES:
        return _OWN
    if owner and word != "reduce":
        return f"{owner[0]}.{word}"
    return word
