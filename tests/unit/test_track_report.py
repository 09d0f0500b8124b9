# SPDX-License-Identifier: Apache-2.0
"""`accelfn report`: the page is whole by itself, in a real browser too, and so is the picture."""

import errno
import html
import http.server
import json
import math
import re
import shutil
import subprocess
import threading
from functools import partial
from xml.etree import ElementTree as ET

import pytest
from PIL import Image

import accelfn as af
from accelfn.cli import main
from accelfn.track.chart import curves
from tests.waiting import HANGS

WORLD = af.World.single(device="cpu")
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
QUIET = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic"),
    *("--no-first-run", "--disable-background-networking", "--disable-sync"),
    *("--disable-component-update", "--window-size=1200,900", "--dump-dom"),
)
NAMES = ["loss", "lr", "grad_norm", "updates per second", "memory_bytes", "$a_b$ <i>&"]
PROBE = """<!DOCTYPE html><title>probe</title>
<iframe src="run.html" width="1100" height="800"></iframe><pre id="told"></pre>
<script>
onload = () => {
  const page = document.querySelector("iframe").contentDocument;
  const style = (each) => page.defaultView.getComputedStyle(each);
  const curves = [...page.querySelectorAll("svg")].map((svg) => ({
    name: svg.parentNode.querySelector("figcaption").textContent,
    wide: svg.getBoundingClientRect().width,
    stroke: style(svg.querySelector("[id$=-curve] path")).stroke,
    drawn: svg.querySelector("[id$=-curve]").getBoundingClientRect().width,
    ink: style(svg.querySelector("text")).fill,
  }));
  const ids = [...page.querySelectorAll("[id]")].map((each) => each.id);
  document.getElementById("told").textContent = JSON.stringify({curves,
    twice: ids.length - new Set(ids).size, back: style(page.body).backgroundColor,
    bold: page.querySelectorAll("i").length, wide: page.body.scrollWidth});
};
</script>"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with a run, and its report."""
    folder = tmp_path_factory.mktemp("run")
    with af.track.jsonl(folder / "run.jsonl", world=WORLD) as tracker:
        tracker.hyperparameters({"setup": af.clip_grad_norm(1.0), "name": "<i>"})
        for step in range(1, 50):
            tracker(
                {
                    "$a_b$ <i>&": 1.0 if step == 7 else math.nan,
                    "memory_bytes": af.track.peak_memory_bytes(WORLD),
                    "grad_norm": 1 / step if step != 5 else math.inf,
                    "lr": 0.1 / step,
                    "loss": 2 / step,
                },
                step,
            )
    with af.track.jsonl(folder / "run.jsonl", world=WORLD, step=40) as tracker:
        tracker({"loss": 3.0}, 41)
    assert main(["report", str(folder)]) == 0
    return folder


def test_the_page_is_whole_by_itself(folder):
    """It names no other file, has no script, and its drawings are XML."""
    page = (folder / "run.html").read_text()
    assert re.findall(r"<script|<link|<img|@import|<iframe|\bsrc=", page) == []
    assert set(re.findall(r'https?://[^"\s]+', page)) <= {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
    }
    drawings = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert len(drawings) == len(NAMES)
    assert all(ET.fromstring(each).tag.endswith("svg") for each in drawings)  # noqa: S314
    assert "af.clip_grad_norm(1.0)" in page
    assert "Resumed after step 40" in page
    assert "9 records are not shown" in page
    assert re.search(r"<td>grad_norm</td>.*<td>1</td></tr>", page)


@pytest.mark.parametrize("last", [math.nan, math.inf, 0.5])
def test_the_last_value_is_what_was_written_last(last, tmp_path):
    """A run that ended in no number says so, beside the least and the largest that were one."""
    with af.track.jsonl(tmp_path / "run.jsonl", world=WORLD) as tracker:
        for step, value in enumerate([2.0, 4.0, last]):
            tracker({"loss": value}, step)
    assert main(["report", str(tmp_path)]) == 0
    page = (tmp_path / "run.html").read_text()
    least, wrong = (0.5, 0) if last == 0.5 else (2, 1)
    cells = [f"{last:g}", f"{least:g}", "4", "3", f"{wrong}"]
    inside = "".join(f"<td>{each}</td>" for each in cells)
    assert f"<td>loss</td>{inside}</tr>" in page


def test_the_same_run_gives_the_same_page(folder):
    """Drawing it again changes no byte."""
    before = (folder / "run.html").read_bytes()
    assert main(["report", str(folder / "run.jsonl")]) == 0
    assert (folder / "run.html").read_bytes() == before


def test_the_picture_is_one(folder):
    """The PNG has one diagram for each curve, two in a row."""
    with Image.open(folder / "run.png") as picture:
        picture.verify()
        assert picture.size == (1800, 1350)


@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium on this machine")
@pytest.mark.parametrize("scheme", ["dark", "light"])
def test_a_browser_shows_the_page(folder, tmp_path, scheme):
    """Each curve is drawn, in colours that stand out from the ground, and nothing is fetched."""
    asked = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *said):
            asked.append(self.path)

    (folder / "probe.html").write_text(PROBE)
    serve = partial(Handler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), serve) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        shown = subprocess.run(
            [
                *(BROWSER, *QUIET, f"--user-data-dir={tmp_path}"),
                f"--blink-settings=preferredColorScheme={int(scheme == 'light')}",
                f"http://127.0.0.1:{server.server_port}/probe.html",
            ],
            capture_output=True,
            text=True,
            timeout=HANGS,
            check=True,
        ).stdout
        server.shutdown()
    found = re.search(r'<pre id="told">(\{.*\})</pre>', shown)
    assert found, shown
    unescaped = found[1].replace("&lt;", "<").replace("&gt;", ">")
    told = json.loads(unescaped.replace("&amp;", "&"))
    assert set(asked) - {"/favicon.ico"} == {"/probe.html", "/run.html"}
    assert [each["name"] for each in told["curves"]] == NAMES
    assert (told["twice"], told["bold"]) == (0, 0)
    assert told["wide"] <= 1100
    assert (brightness(told["back"]) > 0.5) == (scheme == "light")
    for curve in told["curves"]:
        assert curve["wide"] > 300
        assert contrast(curve["ink"], told["back"]) >= 7
        assert contrast(curve["stroke"], told["back"]) >= 4.5
        assert curve["drawn"] > (200 if curve["name"] != NAMES[-1] else 3)  # pixels


def brightness(colour):
    """Return the relative luminance of WCAG of `rgb(r, g, b)`."""
    parts = [int(each) / 255 for each in re.findall(r"\d+", colour)[:3]]
    linear = [
        each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4
        for each in parts
    ]
    return sum(
        w * each for w, each in zip((0.2126, 0.7152, 0.0722), linear, strict=True)
    )


def contrast(one, other):
    """Return WCAG's ratio of contrast."""
    dark, light = sorted((brightness(one), brightness(other)))
    return (light + 0.05) / (dark + 0.05)


def test_a_pause_is_no_throughput(tmp_path):
    """Updates per second are those between records that no resume parts."""
    lines = ['{"accelfn": 1, "began": 0}']
    for step, time in ((10, 100), (20, 105), (30, 110)):
        lines.append(f'{{"step": {step}, "time": {time}, "metrics": {{"loss": 1}}}}')
    lines.append('{"accelfn": 1, "began": 9000}')
    for step, time in ((40, 9000), (50, 9002)):
        lines.append(f'{{"step": {step}, "time": {time}, "metrics": {{"loss": 1}}}}')
    path = tmp_path / "run.jsonl"
    path.write_text("".join(f"{line}\n" for line in lines))
    loss, rate = curves(af.track.read(path))
    assert (loss.name, loss.resumed) == ("loss", (30,))
    assert rate.points == {20: 2.0, 30: 2.0, 50: 5.0}


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ([], "0 files that end in .jsonl (none)"),
        (["a.jsonl", "b.jsonl"], "2 files that end in .jsonl (a.jsonl, b.jsonl)"),
        (["a.jsonl"], "has no metrics yet"),
    ],
)
def test_what_cannot_be_drawn_is_said(tmp_path, capsys, files, said):
    """The command names the run, and leaves nothing."""
    for name in files:
        (tmp_path / name).touch()
    assert main(["report", str(tmp_path)]) == 2
    assert said in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == files


@pytest.mark.parametrize("name", ["log.html", "log.png", "link.jsonl"])
def test_a_report_is_never_written_over_its_run(tmp_path, capsys, name):
    """A run that is named like its page or its picture, or is one by a link, stays."""
    run = tmp_path / name
    if name == "link.jsonl":
        run.symlink_to("link.html")
    with af.track.jsonl(run, world=WORLD) as tracker:
        tracker({"loss": 1.0}, 1)
    before = run.read_bytes()
    assert main(["report", str(run)]) == 2
    assert f"The report of {run} would be " in capsys.readouterr().err
    assert run.read_bytes() == before


@pytest.mark.parametrize(
    "values", [(1e308, -1e308), (1.7e308, 1.6999e308), (5e-324, 1e-323), (1e308,)]
)
def test_every_number_is_drawn(tmp_path, values):
    """The largest floats, whose difference is none, and the smallest have a curve too."""
    with af.track.jsonl(tmp_path / "run.jsonl", world=WORLD) as tracker:
        for step, value in enumerate(values, start=1):
            tracker({"loss": value}, step)
    assert main(["report", str(tmp_path)]) == 0
    page = (tmp_path / "run.html").read_text()
    assert "-curve" in page
    assert f"<td>{values[-1]:.6g}</td>" in page
    assert ("in units of 1e+300" in page) == (abs(values[0]) > 1)
    with Image.open(tmp_path / "run.png") as picture:
        picture.verify()


def test_half_a_letter_is_a_question_mark(tmp_path):
    """JSON can spell what no text can be; the page and the picture are drawn all the same."""
    lines = (
        '{"accelfn": 1, "began": 0}',
        '{"hyperparameters": {"\\ud800": "\\ud801"}, "time": 0}',
        '{"step": 1, "time": 0, "metrics": {"loss\\ud800": 1.0}}',
    )
    (tmp_path / "run.jsonl").write_text("".join(f"{line}\n" for line in lines))
    assert main(["report", str(tmp_path)]) == 0
    assert "<figcaption>loss?</figcaption>" in (tmp_path / "run.html").read_text()
    assert (tmp_path / "run.png").exists()


def test_settings_too_deep_to_show_are_an_error(tmp_path, capsys):
    """What Python cannot read, or cannot show, is named, and nothing is left."""
    depth = 200_000  # Python 3.13 reads 3,000, and shows them
    deep = '{"a": ' * depth + "1" + "}" * depth
    lines = (
        '{"accelfn": 1, "began": 0}',
        f'{{"hyperparameters": {deep}, "time": 0}}',
        '{"step": 1, "time": 0, "metrics": {"loss": 1.0}}',
    )
    (tmp_path / "run.jsonl").write_text("".join(f"{line}\n" for line in lines))
    assert main(["report", str(tmp_path)]) == 2
    assert re.search(
        "recursion|nested too deeply|Stack overflow", capsys.readouterr().err
    )
    assert [path.name for path in tmp_path.iterdir()] == ["run.jsonl"]


def test_without_matplotlib_the_report_says_what_to_install(
    tmp_path, capsys, monkeypatch
):
    """Reading a run needs no package; drawing it names one."""
    with af.track.jsonl(tmp_path / "run.jsonl", world=WORLD) as tracker:
        tracker({"loss": 1.0}, 1)
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    assert main(["report", str(tmp_path)]) == 2
    assert 'pip install "accelfn[report]"' in capsys.readouterr().err


def test_what_cannot_be_written_whole_is_not_there(tmp_path, monkeypatch):
    """Where the disk is full, no half of a picture is left, under any name."""
    run = tmp_path / "run.jsonl"
    with af.track.jsonl(run, world=af.World()) as tracker:
        tracker({"loss": 1.0}, 1)

    def fails(path, _drawn):
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr("accelfn.track.report.save_png", fails)
    assert main(["report", str(run)]) == 2
    assert sorted(each.name for each in tmp_path.iterdir()) == ["run.html", "run.jsonl"]


def test_what_is_looked_at_first_comes_first(tmp_path):
    """Loss, rate, gradient norm, throughput and memory lead, and others keep their order."""
    told = ["zeta", "memory", "accuracy", "Tokens per second", "GradNorm", "lr"]
    with af.track.jsonl(tmp_path / "run.jsonl", world=WORLD) as tracker:
        tracker(dict.fromkeys([*told, "val_loss", "alpha", "loss"], 1.0), 1)
    drawn = [each.name for each in curves(af.track.read(tmp_path / "run.jsonl"))]
    first = ["val_loss", "loss", "lr", "GradNorm", "Tokens per second", "memory"]
    assert drawn == [*first, "zeta", "accuracy", "alpha"]


def test_settings_are_shown_a_line_each(tmp_path):
    """As indented JSON, with letters of any language as they are; the end of a run is told."""
    settings = {"name": "Größe", "inner": {"lr": 0.5, "sizes": [1, 2]}}
    with af.track.jsonl(tmp_path / "run.jsonl", world=WORLD) as tracker:
        tracker.hyperparameters(settings)
        tracker({"loss": 1.0}, 1)
    unfinished = "The last line has no end, and is not shown."
    for rest in ("", '{"step": 2, "ti'):
        with (tmp_path / "run.jsonl").open("a") as file:
            file.write(rest)
        assert main(["report", str(tmp_path)]) == 0
        page = (tmp_path / "run.html").read_text(encoding="utf-8")
        (shown,) = re.findall("<pre>(.*)</pre>", page, re.DOTALL)
        text = json.dumps(settings, indent=2, ensure_ascii=False)
        assert html.unescape(shown) == text
        assert (unfinished in page) == bool(rest)
