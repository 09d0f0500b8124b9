# SPDX-License-Identifier: Apache-2.0
"""Boxes, lines and text as SVG, with the same bytes for the same picture.

A picture is narrow, so that its text is readable on a phone, and follows a dark color scheme.
"""

from collections.abc import Iterable
from html import escape

WIDTH, EDGE = 400, 10
COLORS = {  # in a light and in a dark color scheme
    "ink": ("#1f2933", "#e6e9ee"),
    "pale": ("#5b6673", "#a3adb9"),
    "ground": ("#ffffff", "#14161f"),
    "blue": ("#d6e4f7", "#274468"),
    "green": ("#d8f0dd", "#24523a"),
    "orange": ("#f6a45b", "#9a5212"),
    "grey": ("#d3d9df", "#4b5460"),
}
SANS = "system-ui, 'DejaVu Sans', sans-serif"
MONO = "ui-monospace, 'DejaVu Sans Mono', monospace"


def text(
    x: float,
    y: float,
    words: str,
    *,
    size: float = 12,
    anchor: str = "start",
    color: str = "ink",
    font: str = SANS,
    weight: str = "normal",
) -> str:
    """Return text whose baseline is at y."""
    style = f'font-family="{font}" font-size="{size:g}" font-weight="{weight}"'
    place = f'x="{x:g}" y="{y:g}" text-anchor="{anchor}" xml:space="preserve"'
    return f'<text {place} class="{color}" {style}>{escape(words)}</text>'


def box(
    x: float,
    y: float,
    width: float,
    height: float,
    words: str = "",
    *,
    color: str = "blue",
) -> str:
    """Return a box with text in its middle."""
    place = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4"'
    drawn = f'<rect {place} class="{color}"/>'
    if words:
        middle = x + width / 2, y + height / 2 + 4
        drawn += text(*middle, words, anchor="middle", size=11)
    return drawn


def line(
    x: float,
    y: float,
    to_x: float,
    to_y: float,
    *,
    color: str = "pale",
    width: float = 1,
) -> str:
    """Return a line."""
    ends = f'x1="{x:g}" y1="{y:g}" x2="{to_x:g}" y2="{to_y:g}"'
    return f'<line {ends} class="{color}" stroke-width="{width:g}"/>'


def dot(x: float, y: float, *, color: str = "orange") -> str:
    """Return a dot."""
    return f'<circle cx="{x:g}" cy="{y:g}" r="5" class="{color}"/>'


def picture(height: float, parts: Iterable[str], *, title: str, words: str) -> str:
    """Return a file whose title and description serve readers who cannot see it."""
    size = f'width="{WIDTH}" height="{height:g}"'
    light, dark = (
        "".join(
            f".{name}{{fill:{pair[i]}}}line.{name}{{stroke:{pair[i]}}}"
            for name, pair in COLORS.items()
        )
        for i in (0, 1)
    )
    style = f"<style>{light}@media (prefers-color-scheme:dark){{{dark}}}</style>"
    opening = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}"'
        f' {size} role="img" aria-labelledby="t d">'
    )
    heading = (
        f'<title id="t">{escape(title)}</title>\n<desc id="d">{escape(words)}</desc>'
    )
    ground = f'<rect {size} class="ground"/>'
    return "\n".join([opening, heading, style, ground, *parts, "</svg>\n"])
