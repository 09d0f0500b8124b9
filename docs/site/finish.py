# SPDX-License-Identifier: Apache-2.0
"""Change built pages where Markdown has no syntax for it."""

import re
from html import unescape

LONG = 84
"""Output with a longer line wraps. Shorter lines fit, and may be aligned in columns."""
_OUTPUT = re.compile(
    r'<div class="language-(?:pycon|console|text) (highlight)">.*?</div>', re.DOTALL
)
_PROMPT = re.compile(r'^<span class="gp">')
_LINE = re.compile(r'<span id="[^"]*">(.*?)\n</span>', re.DOTALL)
_TABLE = re.compile(r"<table>.*?</table>", re.DOTALL)
_HEADER = re.compile(r"<th\b[^>]*>(.*?)</th>", re.DOTALL)
_ROW = re.compile(r"<tr>.*?</tr>", re.DOTALL)
_TAG = re.compile(r"<[^>]*>")
_BENCHMARK = re.compile(
    r"(<h2\b.*?</h2>)(.*?)(?=<h2\b|<p class=\"last-run\")", re.DOTALL
)


def finish(html: str) -> str:
    """Return a page whose long output wraps, and whose table cells know their column."""
    return _TABLE.sub(_label_cells, _OUTPUT.sub(_wrap_long_output, html))


def fold_sections(html: str) -> str:
    """Return a page that shows the body of a section when a reader opens it."""
    folded = r'\1<details class="figures"><summary>Figures</summary>\2</details>'
    return _BENCHMARK.sub(folded, html)


def _wrap_long_output(block: re.Match[str]) -> str:
    lines = [line for line in _LINE.findall(block[0]) if not _PROMPT.match(line)]
    is_long = any(len(unescape(_TAG.sub("", line))) > LONG for line in lines)
    return block[0].replace("highlight", "highlight wrap", 1) if is_long else block[0]


def _label_cells(table: re.Match[str]) -> str:
    """Give each cell the name of its column, which narrow screens show before the cell."""
    names = [
        _TAG.sub("", header).replace('"', "&quot;")
        for header in _HEADER.findall(table[0])
    ]

    def label_row(row: re.Match[str]) -> str:
        columns = iter(names)
        return re.sub(
            r"<td\b", lambda _: f'<td data-label="{next(columns, "")}"', row[0]
        )

    return _ROW.sub(label_row, table[0])
