# SPDX-License-Identifier: Apache-2.0
"""Test the notebook of the examples in a real kernel: run it twice, and interrupt it."""

import asyncio
import copy
import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from tests.waiting import HANGS

FOLDER = Path(__file__).parents[1] / "examples"
NOTEBOOKS = sorted(FOLDER.glob("[0-9]*.ipynb"))


class Reader(NotebookClient):
    """Presses Stop in cells that are tagged so, once their bar has moved."""

    def process_message(self, msg: Any, cell: Any, cell_index: int) -> Any:
        """See the bar of a cell being drawn anew, and no older one that ends only now."""
        kind, output = msg["msg_type"], msg["content"].get("transient")
        if kind == "display_data":
            self.newest = output
        moved = kind == "update_display_data" and output == self.newest
        if moved and "stop" in tags(cell) and "stopped" not in tags(cell):
            tags(cell).append("stopped")
            self.stopping = asyncio.ensure_future(self.km.interrupt_kernel())
        return super().process_message(msg, cell, cell_index)


def tags(cell: Any) -> list[str]:
    return cell.metadata.get("tags", [])


def said(cell: Any) -> str:
    texts = [
        out.get("text", "") + out.get("data", {}).get("text/plain", "")
        for out in cell.outputs
    ]
    return "".join(texts)


def errors(cell: Any) -> list[str]:
    return [out.ename for out in cell.outputs if out.output_type == "error"]


def shown(cell: Any, kind: str) -> list[Any]:
    found = (out.get("data", {}) for out in cell.outputs)
    return [data[kind] for data in found if kind in data]


def executed(folder: Path) -> dict[str, Any]:
    """Execute the notebook; return its cells by what they begin with, second runs apart."""
    (path,) = NOTEBOOKS
    notebook, cells = nbformat.read(path, as_version=4), []
    for cell in notebook.cells:
        cells.append(cell)
        if "twice" in tags(cell):
            again = copy.deepcopy(cell)
            again.id, again.metadata["tags"] = f"{cell.id}-again", ["raises-exception"]
            cells.append(again)
    notebook.cells = cells
    Reader(notebook, timeout=HANGS, kernel_name="python3").execute(cwd=str(folder))
    found: dict[str, Any] = {}
    for cell in cells:
        name = cell.source.splitlines()[0]
        found[f"{name} again" if name in found else name] = cell
    return found


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_as_git_likes_it(path):
    """It is valid, short, and without outputs, which each run would change."""
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [([], None)] * len(code) == [
        (cell.outputs, cell.execution_count) for cell in code
    ]
    assert sum(len(cell.source.splitlines()) for cell in code) < 100
    assert path.read_text(encoding="utf-8") == nbformat.writes(notebook) + "\n"


@pytest.mark.slow
def test_a_notebook_runs(tmp_path: Path) -> None:
    """Bars, curves, cells that are run twice, Stop and a launch do what the notebook says."""
    cells = executed(tmp_path)
    # a bar and a curve are one output each, however often they were drawn
    name = "figure, axes = plt.subplots(figsize=(6, 2.5))"
    first, second = cells[name], cells[f"{name} again"]
    assert errors(first) == errors(second) == []
    assert len(shown(first, "image/png")) == 1
    (bar,) = shown(first, "text/html")
    assert "training" in bar
    assert "115/115" in bar
    (right,) = re.findall(r"([\d.]+)% right", said(first))
    assert float(right) > 90
    # run twice, the cell trains nothing, warns, and leaves the state as it is
    assert "until_epoch=5" in said(second)
    assert "Warning" in said(second)
    assert said(second).splitlines()[-1] == said(first).splitlines()[-1]
    # a state that is given twice says which way there is
    name = "later, metrics = step(trial, batch)"
    assert errors(cells[name]) == []
    assert errors(cells[f"{name} again"]) == ["StateDonatedError"]
    (error,) = cells[f"{name} again"].outputs
    assert "update 115" in error.evalue
    assert "Continue with the state that the step returned" in error.evalue
    assert "donate=False" in error.evalue
    # after Stop the state stands where the bar stood, and is used in the next cells
    stopped = [cell for cell in cells.values() if "stop" in tags(cell)]
    assert [errors(cell) for cell in stopped] == [["KeyboardInterrupt"]] * 2
    for name in ("print(state)", "trained = af.salvage(given)"):
        (step,) = map(int, re.findall(r"step (\d+), epoch", said(cells[name])))
        assert 0 < step < 600 * 23
        assert "donated" not in said(cells[name])
        assert errors(cells[name]) == []
    # two ranks train a function of the notebook
    cell = cells["def train(world, epochs):"]
    assert errors(cell) == []
    assert said(cell).endswith("two ranks trained what one does\n")
