# SPDX-License-Identifier: Apache-2.0
"""The package as others get it: its front page on an index, its names, a tree, a wheel."""

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import accelfn as af
from tests.budget import at_night
from tests.internals import configure, system
from tests.waiting import HANGS

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
RELATIVE = re.compile(r"\]\((?!https?://)")


def run(*words, **named):
    return subprocess.run(
        [sys.executable, *map(str, words)],
        check=True,
        capture_output=True,
        text=True,
        timeout=HANGS,
        **named,
    ).stdout


def front_page(text):
    hook = PROJECT["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]
    for each in hook["substitutions"]:
        text = re.sub(each["pattern"], each["replacement"], text)
    return text


def test_no_link_of_the_front_page_on_an_index_is_dead():
    """Links into the repository leave their words; code, and links to the web, stay."""
    readme = (ROOT / "README.md").read_text()
    shown = front_page(readme)
    assert RELATIVE.search(readme)
    assert not RELATIVE.search(shown)
    words = re.compile(r"[\w`]+")
    bare = re.sub(r"\]\((?!https?://)[^)]*\)", "]", readme)
    assert words.findall(shown) == words.findall(bare)


def test_the_changelog_has_the_version():
    """What is unreleased stands first, then the version that pyproject.toml states, dated."""
    unreleased, newest, *_ = re.findall(
        r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE
    )
    version, date = newest.split(" - ")
    assert unreleased == "Unreleased"
    assert version == PROJECT["project"]["version"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", date)


def test_a_python_that_is_named_was_tried():
    """Each version among the classifiers has a row of docs/compatibility.md that passed."""
    table = (ROOT / "docs/compatibility.md").read_text()
    tried = re.findall(r"^\| (3\.\d+)\.\d+ \| .* \| pass\b", table, re.MULTILINE)
    named = re.findall(r"Python :: (3\.\d+)'", str(PROJECT["project"]["classifiers"]))
    assert named == sorted(set(tried))


def test_a_star_takes_the_public_names():
    """`from accelfn import *` has every public name, and none of the rooms."""
    names: dict[str, object] = {}
    exec("from accelfn import *", names)  # noqa: S102 - nowhere else may it stand
    del names["__builtins__"]
    assert af.__all__ == sorted(names)
    assert {"World", "ema", "schedules", "track"} <= set(names)
    assert set() == {"base", "cli", "loop", "compile"} & set(names)


OPTIONAL = "cloudpickle", "hypothesis", "pytest", "rich", "tomlkit", "torchdata"


def test_a_step_imports_no_optional_package(tmp_path):
    """Nor torchdata: only streams with a state read through it."""
    program = (
        "import sys, torch; before = {*sys.modules}; import accelfn as af\n"
        "assert len({*sys.modules} - before) <= 60\n"
        "data = af.Data(torch.ones(4, 2), global_batch_size=2)\n"
        "state = af.TrainState.create(\n"
        "    model=lambda: torch.nn.Linear(2, 1), optimizer=torch.optim.AdamW, data=data)\n"
        "step = af.make_step(lambda model, batch: model(batch).mean())\n"
        "for batch in af.batches(state, until_epoch=1): state, _ = step(state, batch)\n"
        "af.save(state, 'saved')\n"
        f"print({{*{OPTIONAL}}} & {{*sys.modules}})"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    assert run("-c", program, cwd=tmp_path, env=environment) == "set()\n"


@pytest.mark.parametrize(
    ("hidden", "call"),
    [
        ("cloudpickle", lambda _: af.launch(1, print)),
        ("rich.progress", lambda _: af.track.progress([], world=af.World())),
        (
            "tomlkit",
            lambda folder: configure(
                folder / "accelfn.toml", ["nproc=2"], default=False
            ),
        ),
    ],
)
def test_a_missing_package_names_its_extra(hidden, call, monkeypatch, tmp_path):
    """What a light install lacks is named by the call that needs it."""
    monkeypatch.setitem(sys.modules, hidden, None)
    with pytest.raises(
        af.errors.Error, match=r"pip install \"accelfn\[interactive\]\""
    ):
        call(tmp_path)


def test_an_old_torch_names_the_newer_one(monkeypatch):
    """At import below the floor; at what needs more, above it. DDP has its older name."""
    monkeypatch.setattr(system, "VERSION", (2, 10))
    with pytest.raises(
        ImportError, match="needs torch 2.11 or later, but this is torch"
    ):
        system.check_floor()
    monkeypatch.setattr(system, "IS_OLD", True)
    for create in (af.wrap_fsdp, af.compile):
        with pytest.raises(af.errors.CompositionError, match=r"\(\) needs torch 2.13"):
            create()
    options = system.ddp_options({"forward_sync_buffers": False})
    assert options == {"broadcast_buffers": False}


@pytest.mark.slow
def test_a_tree_that_is_not_installed_can_be_imported(tmp_path):
    """Its version is unknown, and says so; the command line works."""
    (tmp_path / "accelfn").symlink_to(ROOT / "accelfn")
    code = (
        "import sys; from importlib import metadata\n"
        "def unknown(name): raise metadata.PackageNotFoundError(name)\n"
        "metadata.version = unknown\n"
        "import accelfn; print(accelfn.__version__, accelfn.__file__)"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    version, file = run("-c", code, cwd=tmp_path, env=environment).split()
    assert version == "0+unknown"
    assert Path(file).is_relative_to(tmp_path)


@pytest.mark.skipif(not at_night(), reason="builds a wheel, by pip: at night")
def test_the_front_page_runs_from_the_wheel(tmp_path):
    """The built wheel, by itself, holds what the README's first block needs, and its types."""
    run("-m", "pip", "wheel", "-q", "--no-deps", "-w", tmp_path, ROOT)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as files:
        files.extractall(tmp_path / "site")
    names = {path.name for path in (tmp_path / "site").iterdir()}
    assert {"accelfn", "pytest_accelfn.py"} == {
        n for n in names if "dist-info" not in n
    }
    (metadata,) = (tmp_path / "site").glob("*.dist-info/METADATA")
    _, _, shown = metadata.read_text().partition("\n\n")
    assert front_page((ROOT / "README.md").read_text()).split() == shown.split()
    for data in ("py.typed", "base/hints.toml"):
        assert (tmp_path / "site/accelfn" / data).exists()
    script = tmp_path / "train.py"
    block = re.search(
        r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL
    )
    script.write_text(f"{block[1]}\nprint(af.__file__)\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    *_, losses, file = run(script, cwd=tmp_path, env=environment).splitlines()
    assert "'loss': " in losses
    assert Path(file).is_relative_to(tmp_path / "site")
