# SPDX-License-Identifier: Apache-2.0
"""Test the documentation: its code runs with the printed output, and its links work."""

import doctest
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
import torch
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser

import accelfn as af
from tests import facts
from tests.waiting import HANGS

ROOT = Path(__file__).parents[1]
LAWS = ROOT / "tests/laws/README.md"
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", LAWS]
PAGES += sorted(ROOT.glob("docs/**/*.md"))
SLOW_PAGES = {
    f"docs/how-to/{name}.md"
    for name in (
        *("accelerate-launch", "big-models", "communication", "launch"),
        *("methods-of-your-own", "notebooks", "test-distributed-code"),
    )
}
"""Whose blocks train for seconds, or start processes."""
NEEDS = {
    "docs/reference/deepspeed.md": ["deepspeed"],
    "docs/how-to/libraries.md": [
        "hydra",
        "torch_geometric",
        "webdataset",
        "bitsandbytes",
    ],
    "docs/how-to/mixup-and-cutmix.md": ["timm", "torchvision"],
}
"""Packages that a page's code imports, and that an installation may lack."""
MODULES = sorted(ROOT.glob("accelfn/**/*.py"))
WRITTEN_BY_A_SESSION = {ROOT / "docs/benchmarks.md"}  # `nox -s bench` makes it

FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
ABSOLUTE_PATH = re.compile(  # but the first line of a script, and what each Linux has
    r"(?<![\w.:/<`!])/(?!dev/shm)[A-Za-z]\w*/[\w./-]+"
)

LAUNCH = ["-m", "accelfn", "launch", "--nproc", "2"]
OPTIONS = doctest.ELLIPSIS
BLOCKS = Sybil(parsers=[PythonCodeBlockParser(doctest_optionflags=OPTIONS)])


def page_name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def anchors(page: Path) -> set[str]:
    """Return the anchors that a Markdown renderer gives a page's headings."""
    headings = HEADING.findall(FENCED.sub("", page.read_text()))
    bare = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings]
    return {heading.strip().replace(" ", "-") for heading in bare}


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(each, marks=[pytest.mark.slow] * (page_name(each) in SLOW_PAGES))
        for each in PAGES
    ],
    ids=page_name,
)
def test_every_code_block_of_a_page_runs(page):
    """The Python blocks of a page run in order and print what the page shows."""
    for package in NEEDS.get(page_name(page), []):
        pytest.importorskip(package)
    for example in BLOCKS.parse(page):
        example.evaluate()


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_every_docstring_example_runs(path):
    """The examples in a module's docstrings print what they show."""
    module = importlib.import_module(module_name(path))
    runner = doctest.DocTestRunner(verbose=False, optionflags=OPTIONS)
    names = {"af": af, "torch": torch, **vars(module), "__name__": "__main__"}
    shown: list[str] = []
    for found in doctest.DocTestFinder().find(module, globs=names):
        runner.run(found, out=shown.append)
    assert not shown, "".join(shown)


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_a_page_can_be_read_anywhere(page):
    """It begins with its title, links to files and headings that exist, and names no machine."""
    assert page.read_text().startswith("# ")
    assert ABSOLUTE_PATH.findall(page.read_text()) == []
    for link in LINK.findall(FENCED.sub("", page.read_text())):
        if link.startswith(("https://", "http://")):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists() or target in WRITTEN_BY_A_SESSION, link
        assert not anchor or anchor in anchors(target), link


def test_every_law_is_in_the_index():
    linked = set(LINK.findall(LAWS.read_text()))
    assert {path.name for path in LAWS.parent.glob("test_*.py")} <= linked


@pytest.fixture(scope="module")
def front_page(tmp_path_factory):
    """README's first block as a script, and the losses that it prints on one process."""
    script = tmp_path_factory.mktemp("front_page") / "train.py"
    script.write_text(next(iter(BLOCKS.parse(ROOT / "README.md"))).parsed)
    return script, printed_losses([], script)


@pytest.mark.slow
@pytest.mark.parametrize(
    "launcher",
    [LAUNCH, ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]],
    ids=["accelfn", "torchrun"],
)
def test_the_front_page_runs_on_two_processes(front_page, launcher):
    """The script trains on two ranks as on one, up to bfloat16's rounding."""
    script, losses = front_page
    assert len(losses) == 3
    assert printed_losses(launcher, script) == pytest.approx(losses, rel=1e-2)


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_a_port_from_accelerate_is_warned_of_nothing(tmp_path):
    """A9, A4, D: the ported script that the page shows runs on two ranks without a word."""
    page = ROOT / "docs/how-to/coming-from-accelerate.md"
    port, *_ = (e.parsed for e in BLOCKS.parse(page) if "from_env" in str(e.parsed))
    script = tmp_path / "port.py"
    script.write_text(port)
    assert printed_losses(LAUNCH, script) == []


def printed_losses(launcher: list[str], script: Path) -> list[float]:
    """Run a script, which is warned of nothing, and return the losses that it printed."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, *launcher, str(script)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=HANGS,
    )
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    return [float(loss) for loss in re.findall(r"'loss': ([\d.e+-]+)", done.stdout)]


@pytest.mark.parametrize("page", [facts.PAGE, facts.SUMMARY])
def test_the_tables_of_a_page_are_those_of_the_code(page):
    """`python -m tests.facts` writes them."""
    text = page.read_text(encoding="utf-8")
    assert "<!-- facts -->" in text
    assert text == facts.page(page)


def test_the_table_of_deepspeed_is_that_of_the_code():
    """`python -m tests.facts` writes it, if DeepSpeed is installed."""
    pytest.importorskip("deepspeed")
    text = facts.DEEPSPEED.read_text(encoding="utf-8")
    assert "`af.wrap_deepspeed(2)` |" in text
    assert text == facts.page(facts.DEEPSPEED)


def test_every_public_transform_is_shown():
    """Each card begins with an example, and each variant has a card."""
    shown = facts.shown(facts.cards())
    assert {type(each) for each in shown} == facts.public() - {af.wrap_deepspeed}
    assert all(each in shown for each in facts.VARIANTS)


def test_every_fact_is_told_by_one():
    """A fact that no transform of accelfn's tells would be nobody's to try."""
    shown = facts.shown(facts.cards())
    told = {fact for each in shown for fact in facts.facts_of(each)}
    assert told == set(facts.FACTS)


PICTURES = sorted(ROOT.glob("docs/pictures/*.svg"))


def test_every_picture_is_up_to_date(tmp_path):
    """Drawn anew they are the same; `python docs/pictures/draw.py` writes them all."""
    command = sys.executable, "docs/pictures/draw.py", str(tmp_path)
    subprocess.run(command, cwd=ROOT, check=True, timeout=HANGS)
    drawn = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert drawn == {path.name: path.read_text() for path in PICTURES}


@pytest.mark.parametrize("path", PICTURES, ids=lambda path: path.stem)
def test_a_picture_is_told_in_words(path):
    """It has a title and a description, and pages that show it say its title."""
    title, words = ET.parse(path).getroot()[:2]  # noqa: S314
    shown = [
        said
        for page in PAGES
        for said, link in re.findall(r"!\[([^\]]*)\]\(([^)]+)\)", page.read_text())
        if (page.parent / link).resolve() == path
    ]
    assert shown
    assert set(shown) == {title.text}
    assert len(words.text) > 100
