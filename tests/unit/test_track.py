# SPDX-License-Identifier: Apache-2.0
"""Trackers: what is refused, what goes where, and what a failing backend does."""

import errno
import io
import json
import math
import sys
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import accelfn as af
from accelfn.testing import simulate
from tests.internals import flat
from tests.processes import limit_files
from tests.ranks.commands import run
from tests.terminal import Terminal

WORLD = af.World.single(device="cpu")
NAMES = st.text(min_size=1).filter(lambda name: name != "step")
VALUES = st.floats() | st.floats(width=32).map(torch.tensor)
RECORDS = st.lists(st.tuples(st.integers(0, 9), st.dictionaries(NAMES, VALUES)))


class Broken:
    """A backend that takes nothing from its second record on."""

    backend = None

    def __init__(self):
        self.steps, self.failed = [], None

    def metrics(self, metrics, step):
        self.steps.append(step)
        if len(self.steps) > 1:
            raise OSError(errno.ENOSPC, "No space left on device")

    def close(self, *, failed):
        self.failed = failed
        if failed:
            raise ConnectionError("no network")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.jsonl"


@pytest.fixture
def memory():
    return af.track.in_memory(world=WORLD)


def track(path, *steps, loss=1.0, **options):
    with af.track.jsonl(path, world=WORLD, **options) as tracker:
        for step in steps:
            tracker({"loss": loss}, step)


def remaining(records):
    """Return what is left of records of which a lower step takes back itself and later ones."""
    left = {}
    for step, metrics in records:
        if left and step < max(left):
            left = {earlier: told for earlier, told in left.items() if earlier < step}
        left[step] = {**left.get(step, {}), **metrics}
    return left


@given(records=RECORDS)
def test_what_was_tracked_is_read_back(tmp_path_factory, records):
    """Numbers come back bitwise while the run writes, unless it went back to before them."""
    path = tmp_path_factory.mktemp("run") / "run.jsonl"
    with af.track.jsonl(path, world=WORLD) as tracker:
        for step, metrics in records:
            tracker(metrics, step)
        left, log = remaining(records), af.track.read(path)
    assert sorted(left) == list(log.times)
    found = {(n, s): v.hex() for n, e in log.metrics.items() for s, v in e.items()}
    told = {(n, s): float(v).hex() for s, e in left.items() for n, v in e.items()}
    assert found == told


@given(cut=st.integers(0, 400))
def test_a_line_is_whole_or_absent(tmp_path_factory, cut):
    """Of a file cut anywhere the whole lines are read, and a tracker goes on after them."""
    path = tmp_path_factory.mktemp("run") / "run.jsonl"
    track(path, *range(5), loss=1 / 3)
    data = path.read_bytes()[:cut]
    path.write_bytes(data)
    lines = [json.loads(line) for line in data.split(b"\n")[:-1]]
    steps = [line["step"] for line in lines if "step" in line]
    assert list(af.track.read(path).times) == steps
    assert af.track.read(path).unfinished == (not data.endswith(b"\n") and cut > 0)
    track(path, 9)
    assert list(af.track.read(path).times) == [*steps, 9]
    assert not af.track.read(path).unfinished


@pytest.mark.parametrize("length", [1, 70_000])
def test_half_a_line_is_cut_off(path, length):
    """What a crash has left of a line is gone when the run goes on, the first line's too."""
    for written in ("", '{"accelfn": 1, "began": 0}\n'):
        path.write_text(written + "x" * length)
        track(path, 9)
        assert path.read_text().startswith(written)
        assert list(af.track.read(path).times) == [9]
    with path.open("a") as file:  # more than is read at once
        file.writelines(f'{{"step": 9, "note": {"y" * 70!r}}}\n' for _ in range(2000))
    lines = path.read_text().count("\n")
    with path.open("a") as file:
        file.write("x" * length)
    af.track.jsonl(path, world=WORLD).close()
    assert path.read_text().count("\n") == lines + 1


def test_a_strict_parser_reads_what_is_not_finite(path):
    """Infinities and NaN are texts, in hyperparameters too, however deep they lie."""
    with af.track.jsonl(path, world=WORLD) as tracker:
        tracker.hyperparameters({"bound": math.inf, "a": [1.5, {"b": [math.nan]}]})
        tracker({"a": math.nan, "b": math.inf, "c": -math.inf}, 1)

    def refuse(constant):
        raise AssertionError(constant)

    lines = path.read_text().splitlines()
    _, told, numbers = (json.loads(line, parse_constant=refuse) for line in lines)
    assert told["hyperparameters"] == {"bound": "Infinity", "a": [1.5, {"b": ["NaN"]}]}
    assert numbers["metrics"] == {"a": "NaN", "b": "Infinity", "c": "-Infinity"}
    assert af.track.read(path).metrics["c"] == {1: -math.inf}


def test_a_resumed_run_takes_back_the_steps_after_its_checkpoint(path):
    """With `step=`, later steps count no more, also those that the run does not reach again."""
    track(path, *range(1, 8))
    track(path, 9, loss=2.0, step=4)
    log = af.track.read(path)
    assert log.metrics["loss"] == {1: 1.0, 2: 1.0, 3: 1.0, 4: 1.0, 9: 2.0}
    assert (log.superseded, log.resumed) == (3, (4,))
    track(path, 20, loss=3.0, step=0)
    log = af.track.read(path)
    assert log.metrics["loss"] == {20: 3.0}
    assert (log.superseded, log.resumed) == (8, (0,))


@pytest.mark.parametrize(
    ("openings", "resumed"),
    [
        ([[1, 2, 3, 4], [3]], (2,)),
        ([[1, 2, 3, 4], [5]], (4,)),
        ([[1, 2, 3, 4], [], [3]], (2, 2)),
        ([[2, 4, 6], [8, 5]], ()),
        ([[1, 2], [3, 4], [4]], (2, 4)),
        ([[1, 2], [3, 4], [2]], (1,)),
    ],
)
def test_a_run_is_resumed_where_its_next_step_says(path, openings, resumed):
    """Where no `step=` did; what was opened before steps that count no more is gone."""
    for steps in openings:
        track(path, *steps)
    assert af.track.read(path).resumed == resumed


def test_a_full_disk_ends_no_training(path):
    """A line the disk took a part of is cut off, a warning names it once, and the end counts."""
    tracker = af.track.jsonl(path, world=WORLD)
    tracker({"loss": 1.0}, 1)
    size = path.stat().st_size
    with limit_files(size + 10):
        with pytest.warns(
            af.errors.TrackingWarning, match="jsonl failed to record .* step 2: OSErr"
        ):
            tracker({"loss": 2.0}, 2)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            tracker({"loss": 3.0}, 3)
    assert path.stat().st_size == size
    tracker({"loss": 4.0}, 4)
    with pytest.warns(
        af.errors.TrackingWarning, match="2 of 4 records; the first failure: .* step 2"
    ):
        tracker.close()
    assert af.track.read(path).metrics["loss"] == {1: 1.0, 4: 4.0}


def test_all_are_closed_where_warnings_are_errors(memory):
    """What one backend lost is an error of accelfn, and the others are closed, too."""
    mine = af.track.custom(Broken, name="mine", world=WORLD)
    tracker = af.track.together(mine, memory)
    tracker({"loss": 1.0}, 1)
    with pytest.raises(af.errors.Error, match="step 2"):
        tracker({"loss": 2.0}, 2)
    with pytest.raises(af.errors.TrackingWarning, match="failed to record 1 of 2"):
        tracker.close()
    assert all(each.is_closed for each in tracker.outlets)


def test_a_backend_that_fails_keeps_no_other_from_its_records(memory):
    """Others get every record, closing failures are named, and the run's own error is raised."""
    broken = Broken()
    mine = af.track.custom(lambda: broken, name="mine", world=WORLD)

    def train():
        with af.track.together(mine, memory) as tracker:
            for step in range(4):
                tracker({"loss": 1.0}, step)
            raise ZeroDivisionError

    with pytest.warns(af.errors.TrackingWarning) as said:  # noqa: SIM117 - this order
        with pytest.raises(ZeroDivisionError):
            train()
    assert list(memory.backends["in_memory"].metrics["loss"]) == [0, 1, 2, 3]
    first, last = (str(each.message) for each in said)
    assert "mine failed to record the metrics of step 1: OSError" in first
    assert "mine failed to record 3 of 4 records" in last
    assert "mine failed to close: ConnectionError: no network" in last
    assert broken.failed


def test_other_ranks_track_nothing_and_refuse_what_rank_0_refuses(tmp_path):
    """Only rank 0 opens a file or a package; a mistake is one on all ranks."""

    def train(world):
        def opened():
            assert world.rank == 0
            return Broken()

        with af.track.together(
            af.track.jsonl(tmp_path / f"{world.rank}.jsonl", world=world),
            af.track.custom(opened, name="mine", world=world),
        ) as tracker:
            tracker({"loss": 1.0}, 1)
            for wrong in ({"loss": torch.zeros(2)}, af.Metrics({"loss": (1.0, 1)})):
                with pytest.raises(af.errors.ArgumentError):
                    tracker(wrong, 2)
            with pytest.raises(af.errors.ArgumentError, match="cannot store images"):
                tracker.images({"seen": torch.zeros(1, 2, 2)}, 1)
            return len(tracker.backends)

    assert simulate(2, train).results == (2, 0)
    assert [path.name for path in tmp_path.iterdir()] == ["0.jsonl"]


@pytest.mark.slow
def test_packages_are_imported_on_rank_0_alone():
    """Trackers of other ranks, and `af.track` itself, import none of the packages."""
    program = (
        "import sys, torch, accelfn as af\n"
        "assert 'accelfn.track' not in sys.modules\n"
        "from accelfn.testing import simulate\n"
        "def train(world):\n"
        "    if world.rank:\n"
        "        for make in (af.track.wandb, af.track.comet, af.track.mlflow,\n"
        "                     af.track.tensorboard):\n"
        "            make('digits', world=world)({'loss': 1.0}, 1)\n"
        "simulate(2, train)\n"
        "packages = {'wandb', 'comet_ml', 'mlflow', 'tensorboard', 'matplotlib'}\n"
        "sys.exit(' '.join(packages & set(sys.modules)) or None)"
    )
    code, _, error = run(sys.executable, "-c", program)
    assert (code, error) == (0, "")


@pytest.mark.parametrize(
    ("make", "module", "extra"),
    [
        (af.track.tensorboard, "tensorboard", "tensorboard"),
        (af.track.wandb, "wandb", "wandb"),
        (af.track.comet, "comet_ml", "comet"),
        (af.track.mlflow, "mlflow", "mlflow"),
    ],
)
def test_a_missing_package_is_named_with_its_command(
    monkeypatch, tmp_path, make, module, extra
):
    """The error says what to type."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(
        af.errors.TrackingError, match=rf"pip install \"accelfn\[{extra}\]\""
    ):
        make("digits", world=WORLD)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("metrics", "step", "said"),
    [
        ({"loss": torch.zeros(2)}, 1, r"tensor of shape \(2,\)"),
        ({"loss": "low"}, 1, "'low'; expected one real number"),
        ({1: 1.0}, 1, "a non-empty str"),
        ({"step": 1.0}, 1, "reserved for the step"),
        ([1.0], 1, "dict by name"),
        ({"loss": 1.0}, -1, "step=-1"),
        ({"loss": 1.0}, True, "step=True"),
        ({"loss": 1.0}, 2**63, "step=9223372036854775808"),
        ({"loss": 10**5000}, 1, "an integer of 16610 bits; expected one real number"),
        ({"loss": np.array(["low"])}, 1, r"an array of shape \(1,\), <U3; expected"),
        ({"loss": torch.zeros((), device="meta")}, 1, "float32 on meta; expected"),
        ({"\ud800": 1.0}, 1, "a non-empty str"),
    ],
)
def test_what_is_no_metric_is_refused(metrics, step, said, memory):
    """A mistake in the call is an error, and nothing of it is tracked."""
    with pytest.raises(af.errors.ArgumentError, match=said):
        memory(metrics, step)
    assert memory.backends["in_memory"].metrics == {}


def test_numbers_of_every_kind_become_floats(memory):
    """Python's, numpy's, tensors' of one element, and metrics of a world of 1."""
    d = torch.tensor([[2]], dtype=torch.bfloat16, requires_grad=True)
    given = {"a": 1, "b": True, "c": np.float32(0.5), "d": d, "e": np.ones(1)}
    memory(given, 1)
    memory(af.Metrics({"loss": (6.0, 2)}), 1)
    found = [repr(v[1]) for v in memory.backends["in_memory"].metrics.values()]
    assert found == ["1.0", "1.0", "0.5", "2.0", "1.0", "3.0"]


def test_images_are_checked_and_converted():
    """Floating-point images become bytes; values are read on rank 0 alone, and warned of."""

    def train(world):
        tracker = af.track.in_memory(world=world)
        for step, dtype in enumerate((torch.float8_e5m2, torch.bfloat16, torch.float)):
            image = torch.tensor([[[0.0, 1.0], [0.5, 0.25]]]).to(dtype)
            tracker.images({"seen": image}, step)
        images = {"seen": torch.tensor([[[0.0, 2.0]]]), "too": torch.zeros(1, 1, 1)}
        tracker.images(images, 3)
        for image, said in (
            (torch.zeros(2, 2), "channels, height, width"),
            (torch.empty((1, 2, 2), device="meta"), "'x' is a tensor of shape"),
            (torch.zeros(1, 2, 2).to_sparse(), "'x' is a tensor of shape"),
        ):
            with pytest.raises(af.errors.ArgumentError, match=said):
                tracker.images({"x": image}, 4)
        return [each.images for each in tracker.backends.values()]

    with pytest.warns(
        af.errors.TrackingWarning, match="step 3: .*'seen' has values from 0 to 2"
    ):
        (kept,), other = simulate(2, train)
    assert (list(kept["seen"]), list(kept["too"]), other) == ([0, 1, 2], [3], [])
    assert [v.tolist() for v in kept["seen"].values()] == [
        [[[0], [255]], [[128], [64]]]
    ] * 3


def test_images_go_to_the_backends_that_have_them(path, memory):
    """Beside one that has them, a backend without is left out; alone it refuses."""
    file = af.track.jsonl(path, world=WORLD)
    with af.track.together(file, memory, None) as tracker:
        tracker.images({"seen": torch.zeros(1, 2, 2)}, 1)
    assert list(memory.backends["in_memory"].images) == ["seen"]
    with pytest.raises(af.errors.TrackingError, match="closed"):
        file({"loss": 1.0}, 1)
    with pytest.raises(af.errors.ArgumentError, match="expected trackers"):
        af.track.together(print)


def test_two_of_a_kind_are_told_apart():
    """The second has a number, in any nesting of `together`; the same twice is refused."""
    one, two, three = (af.track.in_memory(world=WORLD) for _ in range(3))
    with af.track.together(af.track.together(one, two), three) as tracker:
        tracker({"loss": 0.5}, 1)
        found = tracker.backends
    assert list(found) == ["in_memory", "in_memory 2", "in_memory 3"]
    kept = [each.backends["in_memory"] for each in (one, two, three)]
    assert all(a is b for a, b in zip(found.values(), kept, strict=True))
    assert [each.metrics for each in kept] == [{"loss": {1: 0.5}}] * 3
    with pytest.raises(af.errors.ArgumentError, match="in_memory is passed twice"):
        af.track.together(one, None, one)


ITSELF = {}
ITSELF["again"] = ITSELF


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({1: "a", "1": "b"}, "two have the same name '1'"),
        ({"deep": [{1: "a", "1": "b"}]}, "two have the same name '1'"),
        ({"a": {"b": 1}, "a.b": 2}, r"two have the same name 'a\.b'"),
        ({"a.b": 2, "a": {"b": {}}}, r"two have the same name 'a\.b'"),
        (ITSELF, "contain themselves"),
        ([1], "dict by name, got list"),
    ],
)
def test_no_hyperparameter_is_lost(given, said):
    """Names that a backend would make one are refused, on every rank and for any backend."""

    def train(world):
        tracker = af.track.in_memory(world=world)
        with pytest.raises(af.errors.ArgumentError, match=said):
            tracker.hyperparameters(given)
        return [each.hyperparameters for each in tracker.backends.values()]

    assert simulate(2, train).results == ([{}], [])


def test_a_file_that_cannot_be_had_is_named(path, tmp_path):
    """Of two trackers of one file, the second; a missing file, a folder, and what is no path."""
    with (
        af.track.jsonl(path, world=WORLD),
        pytest.raises(af.errors.TrackingError, match="another tracker writes"),
    ):
        af.track.jsonl(path, world=WORLD)
    af.track.jsonl(path, world=WORLD).close()
    with pytest.raises(af.errors.TrackingError, match="could not start: .*run.jsonl"):
        af.track.jsonl(path / "run.jsonl", world=WORLD)
    with pytest.raises(af.errors.ArgumentError, match=r"jsonl\(3\): expected the path"):
        af.track.jsonl(3, world=WORLD)
    for place, why in ((tmp_path / "no", "No such file"), (tmp_path, "directory")):
        said = rf"{place} cannot be read: .*{why}"
        with pytest.raises(af.errors.TrackingError, match=said):
            af.track.read(place)


class Endless:
    """What has a length as far as its type says, and none when it is asked."""

    def __init__(self, error):
        self.error = error

    def __len__(self):
        raise self.error

    def __iter__(self):
        yield from range(3)


@pytest.mark.parametrize("stream", [Terminal, io.StringIO])
def test_a_bar_is_shown_on_a_terminal_of_rank_0_alone(monkeypatch, stream):
    """All is yielded, also without a length: of `af.batches` without epochs, of a stream."""
    shown = stream()
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setenv("TERM", "xterm")
    no_end, no_len = af.errors.ArgumentError("no end"), TypeError("no len")
    for work in (range(3), Endless(no_end), Endless(no_len), iter(range(3))):
        assert list(af.track.progress(work, world=WORLD, label="train")) == [0, 1, 2]

    def on_ranks(world):
        return list(af.track.progress([1, 2], world=world, label=f"rank {world.rank}"))

    assert simulate(2, on_ranks).results == ([1, 2], [1, 2])
    text = shown.getvalue()
    if stream is Terminal:
        assert "train" in text
        assert "3/3" in text
        assert text.count("3/?") >= 3
        assert "rank 0" in text
        assert "rank 1" not in text
    else:
        assert not text
    with pytest.raises(af.errors.ArgumentError, match="expected an iterable"):
        af.track.progress(3, world=WORLD)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 1 is not valid JSON"),
        ("[]", "line 1 is not a record"),
        ('{"step": "1", "time": 0, "metrics": {}}', "line 1 is not a record"),
        ('{"step": 1, "time": 0, "metrics": {"loss": "low"}}', "line 1 is not a rec"),
        ('{"accelfn": 2, "began": 0}', "format 2"),
        ('{"step": 1, "time": 0, "metrics": [1]}', "line 1 is not a record"),
        ('{"step": 1, "time": NaN, "metrics": {}}', "line 1 is not a record"),
        ('{"step": 1, "time": 1e30, "metrics": {}}', "line 1 is not a record"),
        (f'{{"step": {2**63}, "time": 0, "metrics": {{}}}}', "line 1 is not a record"),
        (f'{{"step": 1, "time": 0, "metrics": {{"a": {10**400}}}}}', r"line 1.*000\.$"),
        ("[" * 100_000, "line 1 is not valid JSON"),
    ],
)
def test_what_no_tracker_wrote_is_refused(path, line, said):
    """A foreign line is named by its number."""
    path.write_text(line + "\n")
    with pytest.raises(af.errors.TrackingError, match=said):
        af.track.read(path)


WRONG = [
    *(
        (make, {"step": step}, f"step={step!r}")
        for make in ("jsonl", "tensorboard")
        for step in (-1, 1.0, True, "1")
    ),
    *(
        (make, {"world": world}, rf"af.track.{make}\(world=.*World")
        for make in ("jsonl", "wandb", "mlflow")
        for world in (None, 1, "world", af.World)
    ),
]


@pytest.mark.parametrize(("make", "options", "said"), WRONG)
def test_an_option_that_cannot_be_opens_nothing(tmp_path, make, options, said):
    """What a run is to go on from, and its world, are checked before there is a file."""
    with pytest.raises(af.errors.ArgumentError, match=said):
        getattr(af.track, make)(tmp_path / "run", **{"world": WORLD, **options})
    assert list(tmp_path.iterdir()) == []


class Greedy:
    """A backend that changes all that it is given."""

    backend = None

    def metrics(self, metrics, step):
        metrics.clear()

    def hyperparameters(self, hyperparameters):
        hyperparameters["deep"].clear()

    def images(self, images, step):
        images.pop("seen")[:] = 7

    def close(self, *, failed):
        """Hold nothing."""


def test_no_backend_changes_what_another_gets(memory):
    """Each has a copy of its own, and tensors stay the caller's."""
    accepts = ("images",)
    greedy = af.track.custom(Greedy, name="mine", world=WORLD, accepts=accepts)
    image = torch.zeros(1, 1, 2, dtype=torch.uint8)
    with af.track.together(greedy, memory) as tracker:
        tracker({"loss": 0.5}, 1)
        tracker.hyperparameters({"deep": {"lr": 0.1}})
        tracker.images({"seen": image}, 1)
    kept = memory.backends["in_memory"]
    assert kept.metrics == {"loss": {1: 0.5}}
    assert kept.hyperparameters == {"deep": {"lr": 0.1}}
    assert not kept.images["seen"][1].any()
    assert not image.any()


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (np.int64(5), 5),
        (np.float32(0.5), 0.5),
        (np.longdouble(0.5), 0.5),
        (np.bool_(1), True),
        (torch.tensor(3), 3),
        (torch.tensor(0.5, dtype=torch.bfloat16, requires_grad=True), 0.5),
        (torch.tensor(1).bool(), True),
        ([np.int64(5)], [5]),
        (torch.ones(1), "tensor([1.])"),
        (torch.tensor(1j), "tensor(0.+1.j)"),
        (np.complex64(1j), "np.complex64(1j)"),
        (np.timedelta64(1, "s"), "np.timedelta64(1,'s')"),
        (torch.ones((), device="meta"), "tensor(..., device='meta', size=())"),
    ],
)
def test_settings_of_one_number_are_numbers(given, kept, memory):
    """Python's own, of numpy's scalars and of tensors without a dimension; others are texts."""
    memory.hyperparameters({"a": given})
    found = memory.backends["in_memory"].hyperparameters["a"]
    assert (type(found), found) == (type(kept), kept)


def test_settings_within_settings_have_the_whole_way_for_a_name(memory):
    """However deep they are; names with dots stand beside them where they are different."""
    given = {"a": {"b": {"c": 1, "d": {}}, "e": [1]}, "a.f": 2, "b": [1, {"c": None}]}
    memory.hyperparameters(given)
    assert memory.backends["in_memory"].hyperparameters == given
    expected = {"a.b.c": 1, "a.b.d": "{}", "a.e": "[1]", "a.f": 2}
    assert flat({**given, "b": None}) == {**expected, "b": "None"}
    with pytest.raises(af.errors.ArgumentError, match=r"a\.b"):
        flat({"a": {"b": 1}, "a.b": 2})


@pytest.mark.parametrize("accepts", [("image",), ("images", "videos"), "images"])
def test_what_no_backend_has_is_not_accepted(accepts):
    """Anything but images is refused before the backend is opened."""
    opened = []
    with pytest.raises(
        af.errors.ArgumentError, match=r"accepts=.*: expected \('images',\)"
    ):
        af.track.custom(
            lambda: opened.append(1), name="mine", world=WORLD, accepts=accepts
        )
    assert opened == []
