# SPDX-License-Identifier: Apache-2.0
"""Boxes, lines and words as SVG, the same bytes for the same picture."""

from collections.abc import Iterable
from html import escape

INK, PALE, GROUND = "#1f2933", "#6b7785", "white"
BLUE, GREEN, ORANGE, GREY = "#d6e4f7", "#d8f0dd", "#f6a45b", "#d3d9df"
SANS = "system-ui, 'DejaVu Sans', sans-serif"
MONO = "ui-monospace, 'DejaVu Sans Mono', monospace"


def text(
    x: float,
    y: float,
    said: str,
    *,
    size: float = 12,
    anchor: str = "start",
    ink: str = INK,
    font: str = SANS,
    weight: str = "normal",
) -> str:
    """Return words whose baseline is at y."""
    how = f'font-family="{font}" font-size="{size:g}" font-weight="{weight}"'
    place = f'x="{x:g}" y="{y:g}" text-anchor="{anchor}" xml:space="preserve"'
    return f'<text {place} fill="{ink}" {how}>{escape(said)}</text>'


def box(
    x: float, y: float, wide: float, high: float, said: str = "", *, fill: str = BLUE
) -> str:
    """Return a box with words in its middle."""
    place = f'x="{x:g}" y="{y:g}" width="{wide:g}" height="{high:g}" rx="4"'
    drawn = f'<rect {place} fill="{fill}"/>'
    if said:
        drawn += text(x + wide / 2, y + high / 2 + 4, said, anchor="middle", size=11)
    return drawn


def line(
    x: float, y: float, to_x: float, to_y: float, *, ink: str = PALE, wide: float = 1
) -> str:
    """Return a line."""
    ends = f'x1="{x:g}" y1="{y:g}" x2="{to_x:g}" y2="{to_y:g}"'
    return f'<line {ends} stroke="{ink}" stroke-width="{wide:g}"/>'


def dot(x: float, y: float, *, fill: str = ORANGE) -> str:
    """Return a dot."""
    return f'<circle cx="{x:g}" cy="{y:g}" r="5" fill="{fill}"/>'


def picture(
    wide: float, high: float, parts: Iterable[str], *, title: str, words: str
) -> str:
    """Return a file; those who cannot see it are told its title and its words."""
    told = f'<title id="t">{escape(title)}</title>\n<desc id="d">{escape(words)}</desc>'
    ground = f'<rect width="{wide:g}" height="{high:g}" fill="{GROUND}"/>'
    opened = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide:g} {high:g}"'
        f' width="{wide:g}" height="{high:g}" role="img" aria-labelledby="t d">'
    )
    return "\n".join([opened, told, ground, *parts, "</svg>\n"])
