# SPDX-License-Identifier: Apache-2.0
"""What is wrong with a checkpoint's files or contents is refused, and named (C5 to C24)."""

import errno
import json
import math
import os
import pickle
import random
import re
import shutil
import struct
from functools import partial
from pathlib import Path

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import accelfn as af
from accelfn.errors import (
    AccelfnWarning,
    CheckpointCorruptError,
    CheckpointError,
    CheckpointWriteError,
)
from accelfn.testing import simulate
from tests.checkpoints import (
    FILE,
    MANIFEST,
    STEP,
    Bomb,
    damage,
    node_at,
    nodes,
    plain_of,
    refused,
    reseal,
    sealed,
)
from tests.golden import make as golden
from tests.internals import (
    Manifest,
    Slice,
    best_of,
    commit,
    contents_of,
    files,
    gather_text,
    manifest,
    read_manifest,
    save_of,
)
from tests.states import bits, values

corrupt = partial(refused, kind=CheckpointCorruptError)


class Small(nn.Linear):
    """A linear model with a buffer."""

    def __init__(self, mean=None):
        super().__init__(2, 1)
        self.register_buffer("mean", torch.zeros(2) if mean is None else mean)


def fresh(model=Small, **options):
    """Return a state before its first update."""
    sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    return af.TrainState.create(**{"model": model, "optimizer": sgd, **options})


def made():
    """Return a state an update old."""
    return STEP(fresh(), torch.ones(2, 2))[0]


APART = af.chain(af.local_sgd(sync_every=2), af.ema(0.5))


def of_ranks(folder, world):
    """Save a state whose ranks differ, and of which a tensor is sharded."""
    own = {"w": torch.arange(3.0) + 3 * world.rank, 4: [math.nan, (None,)]}
    state = fresh(setup=APART, world=world, seed=3).with_slot("mine", own)
    state, _ = STEP(state, torch.full((2, 2), world.rank + 1.0))
    job = save_of(state, folder)
    contents = attrs.evolve(
        contents_of(state, "write", metrics={"loss": math.inf, "acc": 0.25}),
        slices={"slots.mine.w": Slice((6,), (3 * world.rank,), (3,))},
    )

    def exchange(what, text):
        return gather_text(text, world, label=what)

    job.run_on_all(exchange, commit.Phase.BEGIN, lambda: commit.begin(job))
    commit.write(job, {"": contents}, exchange)


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """Return checkpoints of one rank, of two, and of three split copies that trained apart."""
    folder = tmp_path_factory.mktemp("faults")
    af.save(made(), folder / "one")
    simulate(2, partial(of_ranks, folder / "two"))

    def save(world):
        setup = af.chain(af.wrap_fsdp(), af.local_sgd(sync_every=4))
        state = fresh(partial(nn.Linear, 2, 2), setup=setup, world=world)
        af.save(STEP(state, torch.ones(2, 2) + world.rank)[0], folder / "copies")

    simulate(6, save, axes={"dp_replicate": 3, "dp_shard": 2})
    return folder


@pytest.fixture
def saved(originals, tmp_path):
    """Return a copy of the checkpoint of one rank."""
    return shutil.copytree(originals / "one", tmp_path / "saved")


@pytest.fixture
def saved_of_two(originals, tmp_path):
    """Return a copy of the checkpoint of two ranks."""
    return shutil.copytree(originals / "two", tmp_path / "two")


def test_a_seal_made_here_is_right(saved):
    """A manifest that these tests seal loads, so what they find refused is not the seal."""
    reseal(saved, dict)
    assert values(made()) == values(af.load(fresh(), saved))


STATES = {
    "outside": lambda states: {"../saved": states["one"]},
    "absolute": lambda states: {"/": states["one"]},
    "no names": lambda _: {},
    "no table": lambda states: [*states],
    "another digest": lambda _: {"one": "0" * 64},
    "no digest": lambda _: {"one": 10**12},
    "deep": lambda _: {"one": json.loads("[" * 500 + "]" * 500)},
    "gone": lambda states: {**states, "two": states["one"]},
}


@pytest.mark.parametrize("case", STATES)
def test_states_that_were_not_saved_together(case, tmp_path):
    """What names them is looked at first, whatever its digest, by whoever reads it."""
    folder = tmp_path / "step-00000001"
    af.save({"one": made()}, folder)
    reseal(folder, lambda plain: plain.update(states=STATES[case](plain["states"])))
    with refused(re.escape(str(folder))):
        af.load({"one": fresh()}, folder)
    with refused(re.escape(str(folder))):
        manifest.verify(folder)
    assert best_of(tmp_path, "loss", "min") == []


# C5, C22: directories.


@pytest.mark.parametrize("where", ["create", "make"])
def test_c5_a_directory_that_cannot_be_written_to(where, tmp_path, monkeypatch):
    """C5: it is refused before the first update; path and reason are named."""

    def refuse(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(files, where, refuse)
    kinds = CheckpointWriteError, OSError
    with pytest.raises(kinds, match=rf"{tmp_path}.*Permission denied") as caught:
        af.CheckpointStore(tmp_path / "runs")
    assert isinstance(caught.value, CheckpointWriteError)  # not the system's own error


def test_c5_a_directory_below_a_file(tmp_path):
    """C5: so is one that cannot be made, by a store and by `save`."""
    (tmp_path / "file").touch()
    with refused(r"cannot write to .*file", CheckpointWriteError):
        af.CheckpointStore(tmp_path / "file" / "runs")
    with refused(r"step 1 was not saved.*begin"):
        af.save(made(), tmp_path / "file" / "saved")


@pytest.mark.parametrize("mask", [0o022, 0o027])
def test_c22_modes_are_those_of_the_umask(mask, tmp_path):
    """C22: whoever may read other new files may read a checkpoint's."""
    before = os.umask(mask)
    try:
        af.save(made(), tmp_path / "saved")
    finally:
        os.umask(before)
    modes = {each.stat().st_mode & 0o777 for each in (tmp_path / "saved").iterdir()}
    assert modes == {0o666 & ~mask}
    assert (tmp_path / "saved").stat().st_mode & 0o777 == 0o777 & ~mask


# C6, C7: bytes that are gone or changed.


def test_c6_a_file_of_tensors_that_is_cut_off(saved):
    """C6: the file is named, with both sizes, though it is not verified."""
    path, state = saved / FILE, fresh()
    whole = path.read_bytes()
    for length in (0, 1, 8, 100, len(whole) - 8, len(whole) - 1):
        path.write_bytes(whole[:length])
        words = rf"{path} is damaged: it has {length} bytes, but had {len(whole)} when"
        with corrupt(words):
            af.load(state, saved, verify=False)


def flips(begin, end, count=80):
    """Draw places of bits."""
    draw = random.Random(f"{begin} {end}")  # noqa: S311 - the same each time
    return [(draw.randrange(begin, end), draw.randrange(8)) for _ in range(count)]


def test_c7_every_flipped_bit_of_data_and_header(saved):
    """C7: of drawn bits all are noticed; file and tensor are named."""
    path, state = saved / FILE, fresh()
    whole, file = path.read_bytes(), read_manifest(saved).files[FILE]
    first = min(each.begin for each in file.tensors.values())
    assert len(file.tensors) > 3
    for at, bit in flips(0, first) + flips(first, len(whole)):
        path.write_bytes(whole)
        damage(path, at, bit)
        within = [n for n, e in file.tensors.items() if e.begin <= at < e.end]
        (name,) = within or ["its header"]
        said = f"{path} has changed since it was saved: the BLAKE3 digest of {name}"
        with corrupt(re.escape(said)):
            af.load(state, saved)


def test_c7_every_flipped_bit_of_a_manifest(tmp_path):
    """C7: of 800 drawn bits all are noticed, those of a number's `e` and an escape too."""
    state = made().with_slot("mine", [1e-300, "é\n", {"é": 5e-324}])
    af.save(state, tmp_path / "saved")
    path = tmp_path / "saved" / MANIFEST
    whole = path.read_bytes()
    for at, bit in flips(0, len(whole), 800):
        path.write_bytes(whole)
        damage(path, at, bit)
        with refused(str(path)):
            read_manifest(path.parent)
    path.write_bytes(whole + b"\n")
    with corrupt("BLAKE3 digest differs"):
        read_manifest(path.parent)


# C8: other formats.


def foreign(path, mark):
    """Return files of other formats, by name; those that run code make a file."""
    torch.save({"weight": torch.ones(2)}, path / "zip")
    torch.save({"w": torch.ones(2)}, path / "old", _use_new_zipfile_serialization=False)
    return {
        "pickle": pickle.dumps(Bomb(mark)),
        "old pickle": pickle.dumps(Bomb(mark), protocol=0),
        "torch zip": (path / "zip").read_bytes(),
        "torch before 1.6": (path / "old").read_bytes(),
        "numpy": b"\x93NUMPY\x01\x00" + bytes(118),
        "gzip": b"\x1f\x8b\x08" + bytes(60),
        "text": b"# weights\n",
        "another safetensors": b"\x02" + bytes(7) + b"{}",
        "a header of 1 TB": struct.pack("<Q", 2**40) + b"{}",
        "nothing": b"",
    }


@pytest.mark.parametrize("name", [FILE, MANIFEST])
@pytest.mark.parametrize("verify", [True, False])
def test_c8_other_formats(name, verify, saved, tmp_path):
    """C8: they are refused by the file's name, and nothing in them runs."""
    mark, state = tmp_path / "mark", fresh()
    for what, data in foreign(tmp_path, mark).items():
        (saved / name).write_bytes(data)
        with corrupt(re.escape(name)):
            af.load(state, saved, verify=verify)
        assert not mark.exists(), what


def test_c8_a_pickle_of_the_same_size(saved, tmp_path):
    """C8: nor does it run if it is as long as what it replaces, and is not verified."""
    size = (saved / FILE).stat().st_size
    (saved / FILE).write_bytes(pickle.dumps(Bomb(tmp_path / "mark")).ljust(size))
    with corrupt("header"):
        af.load(fresh(), saved)
    af.load(fresh(), saved, verify=False)
    assert not (tmp_path / "mark").exists()


def test_c8_no_code_is_ever_loaded():
    """C8: nothing that saves or loads checkpoints can unpickle, evaluate or import by name."""
    package = Path(af.__file__).parent
    sources = [*(package / "checkpoint").rglob("*.py"), package / "base" / "codec.py"]
    # torch_files.py reads what others pickled, as tensors and torch's records of them alone
    read_by_torch = package / "weights" / "torch_files.py"
    sources += {*package.glob("weights/*.py")} - {read_by_torch}
    assert len(sources) > 15
    forbidden = (
        r"\bpickle\.\w|import pickle|(?<!safetensors\.)torch\.load\b|\beval\(|\bexec\("
        r"|__import__|import_module\(|marshal|shelve|(np|numpy)\.load\b"
    )
    for path in sources:
        lines = path.read_text().splitlines()
        assert [line for line in lines if re.search(forbidden, line)] == [], path


# C9: names that lead elsewhere.

NASTY = (
    *("../../x.safetensors", "../rank-00000.safetensors", "./rank-00000.safetensors"),
    *("/etc/passwd", "C:\\x.safetensors", "rank-00000.safetensors\0", "~/x", "CON", ""),
    *("rank-00000.safetensors\n", "rank-00000.safetensors/", "RANK-00000.safetensors"),
    *("rank-\u0660\u0660\u0660\u0660\u0660.safetensors", "rank-00007.safetensors", "."),
    "manifest.json",
)


@given(st.sampled_from(NASTY) | st.text())
def test_c9_any_other_name_of_a_file(originals, name):
    """C9: names of a checkpoint's own files alone are taken."""
    plain = plain_of(originals / "one")
    plain["files"] = {name: plain["files"][FILE]}
    if name != FILE:
        with corrupt("manifest"):
            Manifest.from_bytes(sealed(plain))


def test_c9_an_error_of_a_long_name_is_short(saved):
    """C9: it has the manifest's name, and the beginning of that of the file."""
    reseal(saved, lambda plain: plain.update(files={"x" * 10_000: {}}))
    with corrupt(MANIFEST) as caught:
        af.load(fresh(), saved)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("name", [FILE, MANIFEST])
@pytest.mark.parametrize("kind", ["link", "dangling", "directory", "fifo"])
def test_c9_what_is_no_plain_file(name, kind, saved, tmp_path):
    """C9: a link, even to the right bytes, a directory or a pipe is refused by name."""
    path = saved / name
    path.rename(tmp_path / "elsewhere")
    match kind:
        case "link":
            path.symlink_to(tmp_path / "elsewhere")
        case "dangling":
            path.symlink_to(tmp_path / "nowhere")
        case "directory":
            path.mkdir()
        case "fifo":
            os.mkfifo(path)
    with refused(name):
        af.load(fresh(), saved)


def test_c10_files_that_are_missing_or_too_many(saved_of_two):
    """C10: they are named; what is no file of tensors is let be."""
    (saved_of_two / "notes.txt").touch()
    simulate(2, lambda world: af.load(fresh(setup=APART, world=world), saved_of_two))
    second, third = (f"rank-0000{rank}.safetensors" for rank in (1, 2))
    shutil.copy(saved_of_two / FILE, saved_of_two / third)
    with corrupt(rf"does not list \['{third}'\]"):
        read_manifest(saved_of_two)
    (saved_of_two / third).unlink()
    for name in (second, FILE):
        (saved_of_two / name).rename(saved_of_two / "elsewhere")
        with corrupt(rf"missing: \['{name}'\]"):
            read_manifest(saved_of_two)
        (saved_of_two / "elsewhere").rename(saved_of_two / name)


# C11, C12: what does not fit.

DTYPES = sorted(
    {each for each in vars(torch).values() if isinstance(each, torch.dtype)}, key=str
)
STORED = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.bool),
    *(torch.uint64, torch.uint32, torch.uint16, torch.uint8),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
]


@given(st.sampled_from(STORED), st.sampled_from(STORED))
def test_c11_pairs_of_dtypes(tmp_path_factory, saved, current):
    """C11: another dtype is refused with both, unless `cast` is asked for and can be done."""
    folder = tmp_path_factory.mktemp("dtypes") / "saved"
    mean = torch.tensor([0, 1, 1]).to(saved)
    af.save(fresh(partial(Small, mean)), folder)
    state = fresh(partial(Small, torch.zeros(3).to(current)))
    if saved == current:
        assert bits(mean) == bits(af.load(state, folder).buffers["mean"])
        return
    words = f"mean saved as {saved}, expected {current}"
    with refused(words):
        af.load(state, folder)
    cast = partial(af.load_part, state, folder, only=("buffers",), cast=True)
    if not torch.can_cast(saved, current):
        with refused(words):
            cast()
        return
    loaded = cast()
    assert bits(mean.to(current)) == bits(loaded.state.buffers["mean"])
    assert loaded.cast == {"buffers.mean": f"saved as {saved}, expected {current}"}
    assert f"cast buffers.mean: saved as {saved}, expected" in str(loaded)


class Named(nn.Module):
    """A model of parameters by name, each of a length."""

    def __init__(self, lengths):
        super().__init__()
        for name, length in lengths.items():
            self.register_parameter(name, nn.Parameter(torch.ones(length)))


NAMES = st.dictionaries(
    st.text("abc_", min_size=1, max_size=4).map("p_{}".format),
    st.integers(0, 3),
    max_size=4,
)


@given(NAMES, NAMES)
def test_c12_names_and_shapes(tmp_path_factory, saved, current):
    """C12: what is missing, unexpected or of another shape is named; equal models load."""
    folder = tmp_path_factory.mktemp("names") / "saved"
    saved, current = {"p": 1, **saved}, {"p": 1, **current}
    af.save(fresh(partial(Named, saved)), folder)
    state = fresh(partial(Named, current))
    if saved == current:
        assert bits(state.params) == bits(af.load(state, folder).params)
        return
    with pytest.raises(CheckpointError) as caught:
        af.load(state, folder)
    rows = [row.split() for row in str(caught.value).splitlines()[1:]]
    assert all(row[:2] != ["and", "more"] for row in rows)
    told = {(row[0], row[1]) for row in rows if row[0] in ("missing", "unexpected")}
    assert told == {
        *(("missing", name) for name in current.keys() - saved.keys()),
        *(("unexpected", name) for name in saved.keys() - current.keys()),
    }
    shapes = {row[0] for row in rows if row[1:2] == ["saved"]}
    both = saved.keys() & current.keys()
    assert shapes == {name for name in both if saved[name] != current[name]}


# C13 to C19: contents.


class Tied(nn.Module):
    """Two layers that share a weight."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(2, 2), nn.Linear(2, 2)
        self.two.weight = self.one.weight


def test_c13_tied_parameters(tmp_path):
    """C13: tied parameters are one after loading, in the bound model too."""
    state = fresh(Tied, seed=5)
    with pytest.warns(AccelfnWarning, match="will also change this entry"):
        tied = state.with_slot("mine", state.params["one.weight"])
    af.save(tied, tmp_path / "saved")
    loaded = af.load(fresh(Tied), tmp_path / "saved")
    assert loaded.slots["mine"] is loaded.params["one.weight"]
    assert bits(state.params) == bits(loaded.params)
    with af.borrow_model(loaded) as model:
        assert model.one.weight is model.two.weight


UNUSUAL = {
    "nested": {"a": {}, "b": [], "c": (), "d": [{}, ()]},
    "many without a byte": [torch.empty(0, i) for i in range(4)],
    "requires grad": torch.ones(2, requires_grad=True),
    "conjugate": torch.tensor([1 + 2j]).conj(),
    "negative": torch.tensor([1 + 2j]).conj().imag,
}


@pytest.mark.parametrize("verify", [True, False])
def test_c15_nothing_inside(verify, tmp_path):
    """C15: what has no element, or one, which may be a view, comes back as it was."""
    af.save(fresh().with_slot("mine", UNUSUAL), tmp_path / "saved")
    loaded = af.load(fresh(), tmp_path / "saved", verify=verify)
    assert bits(UNUSUAL) == bits(loaded.slots["mine"])


def test_c15_files_without_a_tensor(tmp_path):
    """C15: a rank that has nothing to write writes a file that says so."""
    folder = tmp_path / "saved"
    simulate(4, lambda world: af.save(fresh(world=world), folder))
    files = read_manifest(folder).files
    assert min(len(each.tensors) for each in files.values()) == 0
    assert bits(fresh().params) == bits(af.load(fresh(seed=1), folder).params)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_c16_every_dtype(dtype, tmp_path):
    """C16: a tensor of any dtype that torch has comes back bitwise, or is refused by it."""
    raw = torch.arange(8, dtype=torch.uint8) % (2 if dtype is torch.bool else 8)
    try:
        tensor = raw.view(dtype)
    except (RuntimeError, TypeError):
        tensor = torch.empty(4, dtype=dtype)
    state = fresh().with_slot("mine", tensor)
    if dtype in STORED:
        af.save(state, tmp_path / "saved")
        assert bits(tensor) == bits(af.load(fresh(), tmp_path / "saved").slots["mine"])
        return
    with refused(rf"slots\.mine.*{dtype}"):
        af.save(state, tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


class Own(torch.Tensor):
    """A tensor class of a user's."""


def unsaveable():
    """Return what has no values of its own that could be saved, with words of the error."""
    one, loop, deep = torch.ones(1), [], torch.ones(1)
    loop.append(loop)
    for _ in range(200):
        deep = [deep]
    freed = torch.ones(5)
    freed.untyped_storage().resize_(0)
    with torch._subclasses.FakeTensorMode():
        fake = torch.ones(2)
    return [
        (object(), "object"),
        ({1, 2}, "set"),
        (np.zeros(3), "ndarray"),
        (len, "builtin"),
        ({"a": [1, {"b": object()}]}, r"a\[1\]\.b.*object"),
        ({(1, 2): 2}, r"key \(1, 2\)"),
        (torch.empty(2, device="meta"), "meta"),
        (fake, "FakeTensor"),
        (torch.eye(2).to_sparse(), "sparse_coo.*to_dense"),
        (torch.sparse_csr_tensor([0, 1], [0], [1.0]), "sparse_csr"),
        (torch.quantize_per_tensor(one, 1.0, 0, torch.qint8), "quant"),
        (torch._nested_tensor_from_tensor_list([one, torch.ones(2)]), "nested"),
        (torch.nested.nested_tensor([one], layout=torch.jagged), "nested"),
        (freed, "freed"),
        (torch.ones(2).as_subclass(Own), "Own"),
        (torch.ones(1, dtype=torch.complex128), "complex128.*view_as_real"),
        (loop, "contains itself"),
        (deep, "100 containers"),
        (10**4300, "integer of"),
        ({10**4300: 1}, "integer of"),
    ]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("async_", [False, True])
def test_c17_without_values_of_its_own(tmp_path, async_):
    """C17: it is refused by its name with what to do, and nothing is left on the disk."""
    state = fresh()
    with af.CheckpointStore(tmp_path / "runs", async_=async_) as store:
        for value, words in unsaveable():
            with refused(rf"slots\.mine\.inside.*{words}"):
                store.save(state.with_slot("mine", {"inside": value}))
            assert store.steps == (), words
            with refused(words):
                af.save(state.with_slot("mine", value), tmp_path / "saved")
            assert not (tmp_path / "saved").exists()
    af.save(state, tmp_path / "saved")


KEYS = st.one_of(
    st.text(st.characters(), max_size=20),
    st.sampled_from(["__metadata__", "", "a/b", "..", "<0>", "<1>", "x" * 10_000]),
    st.sampled_from(["a.b", "tensor", "dict", "float", "pairs"]),
    st.integers(-(2**70), 2**70),
)


@given(st.dictionaries(KEYS, st.dictionaries(KEYS, st.integers(0, 3), max_size=3)))
def test_c19_names_of_any_kind(tmp_path_factory, names):
    """C19: what tensors and dicts are called comes back; no two become one."""
    value = {
        outer: {inner: torch.tensor([i]) for inner, i in inside.items()}
        for outer, inside in names.items()
    }
    folder = tmp_path_factory.mktemp("text") / "saved"
    af.save(fresh().with_slot("mine", value), folder)
    back = af.load(fresh(), folder).slots["mine"]
    assert bits(value) == bits(back)
    assert [type(key) for key in value] == [type(key) for key in back]


# C20, C24: manifests that are sealed, and wrong.


FREE = {"data", "transforms", "optimizer", "persistent"}


def is_typed(path):
    """Whether a node may be of one kind alone."""
    in_slots = any(str(each).startswith("slots.") for each in path)
    slots = path[0].startswith("trees") and in_slots
    return not (slots or "opt_state" in path or path[0] in FREE or path[-1] == 2)


KINDS = None, True, -5, 0.5, "x", [[]], {"x": {}}


@given(st.data())
def test_c20_any_other_kind(originals, data):
    """C20: a node of another kind is refused as such, with its place."""
    plain = plain_of(originals / "two")
    typed = [path for path in nodes(plain) if path != ("blake3",) and is_typed(path)]
    path = data.draw(st.sampled_from(typed))
    parent, old = node_at(plain, path[:-1]), node_at(plain, path)
    other = data.draw(st.sampled_from([k for k in KINDS if type(k) is not type(old)]))
    if path[0] == "metrics" and len(path) == 2:  # a number of either kind, or a name
        other = None
    parent[path[-1]] = other
    with corrupt("expected|format"):
        Manifest.from_bytes(sealed(plain))


WRONG_SHAPES = [
    *([-1], [2**62], [2**32, 2**32], [2**70], [2**62, 2**62, 0], [1] * 1000),
    *([1.0], [True]),
]
WRONG_ENTRIES = [
    *({"shape": shape} for shape in WRONG_SHAPES),
    *({"dtype": dtype} for dtype in ("F4", ["F32"], "F64")),
    *({"begin": 0}, {"end": 10**6}, {"begin": 2**80, "end": 2**80}),
]
WRONG_FILES = [{"size": 2**62}, {"tensors": {}}, {"blake3": "0"}]
WRONG_TREES = [
    *({"other": 1}, {"step": -1}, {"cursor": {"list": [0]}}),
    *({"slots.x": {"tensor": "nowhere"}}, {"slots.x": {"set": []}}, {"slots.x": [1]}),
    *({"slots.x": {"dict": {}, "list": []}}, {"slots.x": {"float": "1"}}),
    {"slots.x": {"pairs": [[1, 1], [1, 2]]}},
]
WRONG_MANIFESTS = [
    *({"files": {}}, {"world_size": 0}, {"world_size": 10**18}, {"extra": 1}),
    *({"trees_by_rank": [{}, {}]}, {"format": "1"}, {"format": True}, {"step": 7}),
    *({"copies": [10**12]}, {"metrics": {"loss": 10**400}}),
]
WHOLE = {"dtype": "F32", "shape": [0, 2**62, 2**62], "slices": {}}
WRONG = [
    *((("files", FILE, "tensors", "params.weight"), each) for each in WRONG_ENTRIES),
    *((("files", FILE), each) for each in WRONG_FILES),
    *((("trees",), each) for each in WRONG_TREES),
    *(((), each) for each in WRONG_MANIFESTS),
    (("sharded",), {"x": WHOLE}),
]


def with_more(at, more, plain):
    node_at(plain, at).update(more)


def step_beyond_64_bits(plain):
    plain.update(step=2**80)
    plain["trees"].update(step=2**80)


CHANGES = [
    *(partial(with_more, *each) for each in WRONG),
    lambda plain: plain.pop("kept"),
    lambda plain: plain["trees"].pop("params"),
    lambda plain: plain["files"].update(
        {"rank-000000.safetensors": plain["files"].pop(FILE)}
    ),
    step_beyond_64_bits,
]


@pytest.mark.parametrize("change", CHANGES, ids=range(len(CHANGES)))
def test_c20_a_sealed_manifest_that_is_wrong(change, saved):
    """C20: what no save writes is refused before anything is read or made for it."""
    reseal(saved, change)
    with corrupt(MANIFEST):
        af.load(fresh(), saved)


SLICES = {  # of the second rank's slice, and of the sharded tensor
    "overlapping": ({"offset": [2]}, {}),
    "outside": ({"offset": [4]}, {}),
    "far outside": ({"offset": [2**62]}, {}),
    "of another size": ({"size": [2]}, {}),
    "of other dims": ({"offset": [3, 0], "size": [3, 1]}, {}),
    "of too much": ({}, {"shape": [7]}),
    "of very much": ({}, {"shape": [2**62]}),
    "of another dtype": ({}, {"dtype": "I32"}),
    "missing": ({}, {"slices": {FILE: {"offset": [0], "size": [3]}}}),
}


@pytest.mark.parametrize("case", [*SLICES, "of no file", "of no tensor"])
def test_c20_slices_that_are_no_whole(case, saved_of_two):
    """C20: slices that overlap, or leave something open, are refused by the manifest."""

    def change(plain):
        whole = plain["sharded"]["slots.mine.w"]
        if case == "of no tensor":
            plain["sharded"]["x"] = plain["sharded"].pop("slots.mine.w")
        elif case == "of no file":
            whole["slices"]["x"] = {"offset": [6], "size": [0]}
        else:
            of_slice, of_whole = SLICES[case]
            whole["slices"]["rank-00001.safetensors"].update(of_slice)
            whole.update(of_whole)

    reseal(saved_of_two, change)
    with corrupt(r"manifest\.json.*('x'|slots\.mine\.w)"):
        read_manifest(saved_of_two)


COPIES = {
    "of fewer ranks": lambda p: p["copies"].pop(),
    "with a gap": lambda p: p.update(copies=[0, 0, 2, 2, 3, 3]),
    "of nothing": lambda p: p.update(copies=[0, 0, 1, 1, -1, -1]),
    "with other slices": lambda p: p.update(copies=[0, 1, 0, 1, 2, 2]),
    "that were one": lambda p: p.update(copies=[0] * 6),
    "left out": lambda p: p.pop("copies"),
    "of which one has nothing": lambda p: [
        p["sharded"]["params.weight"]["slices"].pop(f"rank-0000{rank}.safetensors")
        for rank in (4, 5)
    ],
}


@pytest.mark.parametrize("case", COPIES)
def test_c20_copies_that_are_none(case, originals, tmp_path):
    """C20: each copy of a model has all of it, and each rank a part of one."""
    saved = shutil.copytree(originals / "copies", tmp_path / "saved")
    read_manifest(saved)
    reseal(saved, COPIES[case])
    with corrupt(r"manifest\.json"):
        read_manifest(saved)


BOMBS = {
    "lists": b"[" * 1_000_000,
    "tables": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "a depth": b'{"format": 2, "data": ' + b"[" * 900 + b"]" * 900 + b"}",
    "an integer": b'{"format": 2, "step": ' + b"9" * 100_000 + b"}",
    "an integer as its format": b'{"format": ' + b"9" * 100_000 + b"}",
    "a name twice": b'{"format": 2, "step": 1, "step": 2}',
    "a name a million times": b"{" + b'"a":0,' * 1_000_000 + b'"a":0}',
    "half a character": b'{"format": 2, "x": "\\ud800"}',
    "no UTF-8": b'{"format": 2, "x": "\xff"}',
    "NUL": b"\0" * 1000,
    "a number": b"1",
    "null": b"null",
    "no object": b"[]",
    "a list": b'["format", 2]',
    "empty": b"{}",
    "only a format": b'{"format": 2}',
}
NO_MANIFEST = "a number", "null", "no object", "a list", "empty"


@pytest.mark.parametrize("case", BOMBS)
def test_c20_json_bombs(case, saved):
    """C20: JSON of any size and depth is refused by the manifest's name, in a moment."""
    (saved / MANIFEST).write_bytes(BOMBS[case])
    with corrupt(MANIFEST) as caught:
        af.load(fresh(), saved)
    expected = 'expected a JSON object with "format"'
    assert (expected in str(caught.value)) == (case in NO_MANIFEST)


@pytest.mark.parametrize("depth", [150, 900])
def test_c20_sealed_depth(depth, saved):
    """C20: nothing lies deeper than what a save writes."""
    plain = plain_of(saved)
    del plain["blake3"]
    plain["trees"]["slots.deep"] = "here"
    deep = '{"list": [' * depth + "1" + "]}" * depth
    (saved / MANIFEST).write_bytes(sealed(json.dumps(plain).replace('"here"', deep)))
    with corrupt(MANIFEST):
        af.load(fresh(), saved)


def test_c20_sealed_containers(saved, monkeypatch):
    """C20: a manifest with too many lists and tables is neither read nor written."""
    monkeypatch.setattr(manifest, "_MOST", 1000)
    many = {"list": [{"list": []}] * 2000}
    reseal(saved, lambda plain: plain["trees"].update({"slots.x": many}))
    with corrupt("lists and tables"):
        af.load(fresh(), saved)
    state = made().with_slot("mine", [[]] * 2000)
    with refused(r"lists and tables.*as a tensor", CheckpointWriteError):
        af.save(state, saved.parent / "other")


def test_c20_an_error_is_short(saved):
    """C20: an error quotes the beginning of long facts of the data."""
    data = {f"x{i}": "y" * 10_000 for i in range(100)}
    reseal(saved, lambda plain: plain.update(data={"samples": 1, **data}))
    state = fresh(data=af.Data(torch.ones(4, 2), global_batch_size=2))
    with refused("other data") as caught:
        af.load(state, saved)
    assert len(str(caught.value)) < 3000


def test_c20_no_memory_for_what_is_not_asked_for(tmp_path, monkeypatch):
    """C20: `verify` reads a tensor that nobody needs in pieces, and finds a changed bit."""
    monkeypatch.setattr(files, "_BLOCK", 1000)
    af.save(made().with_slot("large", torch.arange(10_000.0)), tmp_path / "saved")
    sizes, empty = [], files.empty

    def seen(shape, dtype):
        tensor = empty(shape, dtype)
        sizes.append(tensor.nbytes)
        return tensor

    monkeypatch.setattr(files, "empty", seen)
    manifest.verify(tmp_path / "saved")
    assert max(sizes) <= 1000
    at = read_manifest(tmp_path / "saved").files[FILE].tensors["slots.large"].begin
    damage(tmp_path / "saved" / FILE, at)
    with corrupt(r"slots\.large differs"):
        manifest.verify(tmp_path / "saved")


def test_c20_a_manifest_of_many_bytes(saved):
    """C20: one longer than any that is written is refused before it is read."""
    with (saved / MANIFEST).open("r+b") as file:
        file.truncate(2**40)
    with corrupt(rf"{2**40} bytes, and .* more than"):
        af.load(fresh(), saved)


def test_c20_a_manifest_too_long_to_be_read_is_not_written(monkeypatch, tmp_path):
    """C20: so a checkpoint that was saved can be loaded."""
    monkeypatch.setattr(manifest, "_LARGEST", 1000)
    with refused("manifest would have", CheckpointWriteError):
        af.save(made(), tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


@pytest.mark.parametrize("version", [1, 3, 99])
def test_c24_another_format(version, saved):
    """C24: the error has the number of the format, and the one that is read."""
    (saved / MANIFEST).write_text(json.dumps({"format": version, "other": []}))
    with refused(rf"format {version}, .*reads format 2"):
        af.load(fresh(), saved)


@pytest.mark.parametrize("case", golden.CASES)
def test_c24_golden_checkpoints(case):
    """C24: what an earlier version wrote loads bitwise, for ever."""
    expected = json.loads((golden.FOLDER / f"{case}.json").read_text())
    assert expected == golden.loaded(case, golden.FOLDER / case)
