# SPDX-License-Identifier: Apache-2.0
"""`accelfn report`: a run's jsonl as one page that needs nothing else, and as a picture."""

import json
import os
import time
from collections.abc import Callable
from html import escape
from pathlib import Path

from accelfn.base import paths
from accelfn.errors import TrackingError
from accelfn.track.chart import Curve, as_svg, curves, save_png
from accelfn.track.log import Log, read

_STYLE = """
:root { color-scheme: light dark; --back: #ffffff; --ink: #1a1a1a; --line: #0072b2;
  --mark: #b34700; --grid: #d0d0d0; }
@media (prefers-color-scheme: dark) { :root { --back: #15181c; --ink: #e8e8e8;
  --line: #56b4e9; --mark: #f0a050; --grid: #454a50; } }
body { background: var(--back); color: var(--ink); font: 16px/1.5 system-ui, sans-serif;
  margin: 0 auto; max-width: 80rem; padding: 1rem; overflow-wrap: anywhere; }
main { display: grid; gap: 1rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 28rem), 1fr)); }
figure { margin: 0; } figcaption { font-weight: 600; }
svg { height: auto; max-width: 100%; }
table { border-collapse: collapse; } pre { white-space: pre-wrap; }
th, td { border-bottom: 1px solid var(--grid); padding: .2rem .8rem; text-align: right; }
th:first-child, td:first-child { text-align: left; }
"""
_ALONE = "default-src 'none'; style-src 'unsafe-inline'"


def report(run: str) -> tuple[list[str], int]:
    """Write a page and a picture beside a run's jsonl, in place of those that are there.

    Args:
        run: the file, or a folder with one file that ends in `.jsonl`.

    Returns:
        What to print, and the exit code.

    Raises:
        TrackingError: there is no run, it has no numbers, it has the name of its own page or
            picture, or matplotlib is missing.
    """
    log = read(_file(Path(run)))
    page, picture = (log.path.with_suffix(each) for each in (".html", ".png"))
    for made in (page, picture):
        if made == log.path or (paths.exists(made) and made.samefile(log.path)):
            msg = f"The report of {log.path} would be {made}, the run itself; rename the run."
            raise TrackingError(msg)
    drawn = curves(log)
    if not drawn:
        msg = f"{log.path} has no metrics yet; nothing can be drawn."
        raise TrackingError(msg)
    # half a letter, which JSON can have, is a question mark
    text = as_page(log, drawn).encode("utf-8", "replace")
    try:
        _replace(page, lambda path: path.write_bytes(text))
        _replace(picture, lambda path: save_png(path, drawn))
    except OSError as error:
        msg = f"The report of {log.path} was not written: {error}."
        raise TrackingError(msg) from error
    return [str(page), str(picture)], 0


def _file(run: Path) -> Path:
    if not paths.is_directory(run):
        return run
    found = sorted(run.glob("*.jsonl"))
    if len(found) != 1:
        names = ", ".join(path.name for path in found) or "none"
        msg = f"{run} has {len(found)} files that end in .jsonl ({names}); name one."
        raise TrackingError(msg)
    return found[0]


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file that is whole once it has its name."""
    draft = path.with_name(f".tmp-{os.getpid()}-{path.name}")
    try:
        write(draft)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def as_page(log: Log, drawn: list[Curve]) -> str:
    """Return the page: HTML without scripts, which loads nothing from anywhere."""
    title = escape(log.path.stem)
    figures = "\n".join(
        f'<figure role="img" aria-label="{escape(_said(curve))}">'
        f"<figcaption>{escape(curve.name)}</figcaption>\n{as_svg(curve, i)}</figure>"
        for i, curve in enumerate(drawn)
    )
    rows = "\n".join(map(_row, drawn))
    facts = "\n".join(f"<p>{escape(fact)}</p>" for fact in _facts(log))
    told = escape(_told(log))
    settings = (
        f"<h2>Hyperparameters</h2>\n<pre>{told}</pre>" if log.hyperparameters else ""
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_ALONE}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>{title}</h1>
{facts}
<main>
{figures}
</main>
<h2>Numbers</h2>
<table>
<thead><tr><th>metric</th><th>last</th><th>lowest</th><th>highest</th>
<th>records</th><th>not finite</th></tr></thead>
<tbody>
{rows}
</tbody>
</table>
{settings}
</body>
</html>
"""


def _told(log: Log) -> str:
    try:
        return json.dumps(log.hyperparameters, indent=2, ensure_ascii=False)
    except RecursionError:
        msg = f"{log.path}: the hyperparameters are nested too deeply to be shown."
        raise TrackingError(msg) from None


def _facts(log: Log) -> list[str]:
    steps, times = list(log.times), list(log.times.values())
    day = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(times[0]))
    facts = [f"Steps {steps[0]} to {steps[-1]}, from {day} on."]
    if log.resumed:
        where = ", ".join(map(str, log.resumed))
        facts.append(f"Resumed after step {where} (dashed lines).")
    if log.superseded:
        facts.append(
            f"{log.superseded} records are not shown: the run went back to before them."
        )
    if log.unfinished:
        facts.append("The last line has no end, and is not shown.")
    return facts


def _said(curve: Curve) -> str:
    """Return a curve in a sentence, for those who cannot see it."""
    finite = curve.finite
    wrong = len(curve.points) - len(finite)
    ends = (
        [f"{finite[s]:.6g} at step {s}" for s in (min(finite), max(finite))]
        if finite
        else []
    )
    said = " to ".join(["from " + ends[0], ends[1]] if ends else [])
    also = f"{wrong} values not finite, marked by crosses" if wrong else ""
    return f"{curve.name} by step: " + "; ".join(filter(None, (said, also)))


def _row(curve: Curve) -> str:
    finite = list(curve.finite.values())
    last = list(curve.points.values())[-1]
    ends = (
        [f"{each:.6g}" for each in (min(finite), max(finite))] if finite else ["", ""]
    )
    wrong = len(curve.points) - len(finite)
    cells = [f"{last:.6g}", *ends, str(len(curve.points)), str(wrong)]
    inside = "".join(f"<td>{each}</td>" for each in cells)
    return f"<tr><td>{escape(curve.name)}</td>{inside}</tr>"
