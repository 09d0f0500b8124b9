# SPDX-License-Identifier: Apache-2.0
"""Traffic as lines of text."""

from collections.abc import Mapping, Sequence

_TOTAL = "all"
_NO_LABEL = "no label"


def written(
    columns: Mapping[int, Mapping[str | None, int]],
    updates: int,
    seconds: Mapping[int, float] | None = None,
) -> str:
    """Return a table of bytes an update, by label and number of ranks.

    Args:
        columns: by the number of ranks, the bytes of all updates by label.
        updates: how many updates these are.
        seconds: of an update, by the number of ranks.
    """
    labels = list(dict.fromkeys(label for each in columns.values() for label in each))
    head = [f"{size} rank{'s' * (size != 1)}" for size in columns]
    rows = [("bytes an update", *head)]
    for label in labels:
        sent = [_each(column.get(label, 0), updates) for column in columns.values()]
        rows.append((_NO_LABEL if label is None else label, *sent))
    totals = [sum(column.values()) for column in columns.values()]
    rows.append((_TOTAL, *(_each(total, updates) for total in totals)))
    shares = zip(totals, columns, strict=True)
    rows.append(("of these, a rank", *(_each(t, updates * n) for t, n in shares)))
    if seconds is not None:
        rows.append(("seconds an update", *(f"{s:.3g}" for s in seconds.values())))
    return _aligned(rows)


def _each(total: int, parts: int) -> str:
    whole, rest = divmod(total, parts)
    return f"{whole:,}" if not rest else f"{total / parts:,.1f}"


def _aligned(rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines: list[str] = []
    for first, *others in rows:
        cells = [o.rjust(w) for o, w in zip(others, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *cells]))
    return "\n".join(lines)
