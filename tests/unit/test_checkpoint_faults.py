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
import pytest
import torch
from blake3 import blake3
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
from tests.budget import at_night
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

FILE, MANIFEST = "rank-00000.safetensors", "manifest.json"


class Small(nn.Linear):
    """A linear model with a buffer."""

    def __init__(self, mean=None):
        super().__init__(2, 1)
        self.register_buffer("mean", torch.zeros(2) if mean is None else mean)


def fresh(model=Small, **options):
    """Return a state before its first update."""
    sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    return af.TrainState.create(**{"model": model, "optimizer": sgd, **options})


def made(**options):
    """Return a state an update old."""
    step = af.make_step(lambda model, batch: model(batch).square().mean())
    return step(fresh(**options), torch.ones(2, 2))[0]


def of_ranks(folder, world):
    """Save a state whose ranks differ, and of which a tensor is sharded."""
    state = fresh(
        setup=af.chain(af.local_sgd(sync_every=2), af.ema(0.5)), world=world, seed=3
    ).with_slot(
        "mine", {"w": torch.arange(3.0) + 3 * world.rank, 4: [math.nan, (None,)]}
    )
    step = af.make_step(lambda model, batch: model(batch).square().mean())
    state, _ = step(state, torch.full((2, 2), world.rank + 1.0))
    job = save_of(state, folder)
    place = Slice((6,), (3 * world.rank,), (3,))
    contents = attrs.evolve(
        contents_of(state, "write", metrics={"loss": math.inf, "acc": 0.25}),
        slices={"slots.mine.w": place},
    )

    def exchange(what, text):
        return gather_text(text, world, label=what)

    job.run_on_all(exchange, commit.Phase.BEGIN, lambda: commit.begin(job))
    commit.write(job, {"": contents}, exchange)
    return state


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """Return a checkpoint of one rank."""
    folder = tmp_path_factory.mktemp("faults") / "original"
    af.save(made(), folder)
    return folder


@pytest.fixture(scope="module")
def original_of_two(tmp_path_factory):
    """Return a checkpoint of two ranks."""
    folder = tmp_path_factory.mktemp("faults") / "two"
    simulate(2, partial(of_ranks, folder))
    return folder


@pytest.fixture
def saved(original, tmp_path):
    """Return a copy of the checkpoint of one rank."""
    return shutil.copytree(original, tmp_path / "saved")


@pytest.fixture
def saved_of_two(original_of_two, tmp_path):
    """Return a copy of the checkpoint of two ranks."""
    return shutil.copytree(original_of_two, tmp_path / "two")


def load_of_two(folder):
    """Load the checkpoint of two ranks as the first of them would."""
    setup = af.chain(af.local_sgd(sync_every=2), af.ema(0.5))
    simulate(2, lambda world: af.load(fresh(setup=setup, world=world), folder))


def plain_of(folder):
    """Return what a manifest says."""
    return json.loads((folder / MANIFEST).read_text())


def sealed(plain):
    """Return a manifest's bytes with a digest that is right."""
    plain = {name: value for name, value in plain.items() if name != "blake3"}
    said = json.dumps(plain, indent=1).encode().removeprefix(b"{\n")
    seal = blake3(said).hexdigest()
    return b'{\n "blake3": "%s",\n' % seal.encode() + said


def reseal(folder, change):
    """Change what a manifest says, and seal it again."""
    plain = plain_of(folder)
    change(plain)
    (folder / MANIFEST).write_bytes(sealed(plain))


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
    "nothing": lambda _: {"one": None},
    "deep": lambda _: {"one": json.loads("[" * 500 + "]" * 500)},
    "gone": lambda states: {**states, "two": states["one"]},
}


@pytest.mark.parametrize("case", STATES)
def test_states_that_were_not_saved_together(case, tmp_path):
    """What names them is looked at first, whatever its digest, by whoever reads it."""
    folder = tmp_path / "step-00000001"
    af.save({"one": made()}, folder)
    reseal(folder, dict)
    assert values(af.load({"one": fresh()}, folder)["one"]) == values(made())
    reseal(folder, lambda plain: plain.update(states=STATES[case](plain["states"])))
    with pytest.raises(CheckpointError, match=re.escape(str(folder))):
        af.load({"one": fresh()}, folder)
    with pytest.raises(CheckpointError, match=re.escape(str(folder))):
        manifest.verify(folder)
    assert best_of(tmp_path, "loss", "min") == []


# C5, C22: directories.


@pytest.mark.parametrize("where", ["create", "make"])
def test_c5_a_directory_that_cannot_be_written_to(where, tmp_path, monkeypatch):
    """C5: it is refused before the first update; path and reason are named."""

    def refuse(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(files, where, refuse)
    words = rf"{tmp_path}.*Permission denied"
    with pytest.raises(CheckpointWriteError, match=words):
        af.CheckpointStore(tmp_path / "runs")


def test_c5_a_directory_below_a_file(tmp_path):
    """C5: so is one that cannot be made."""
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointWriteError, match=r"cannot write to .*file"):
        af.CheckpointStore(tmp_path / "file" / "runs")


@pytest.mark.parametrize("mask", [0o022, 0o027, 0o002, 0o077])
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


@pytest.mark.parametrize("verify", [True, False])
def test_c6_every_truncation_of_a_file_of_tensors(saved, verify):
    """C6: the file is named, with both sizes."""
    path, state = saved / FILE, fresh()
    whole = path.read_bytes()
    for length in lengths(whole):
        path.write_bytes(whole[:length])
        words = rf"{path} is damaged: it has {length} bytes, but had {len(whole)} when"
        with pytest.raises(CheckpointCorruptError, match=words):
            af.load(state, saved, verify=verify)


def lengths(whole):
    """Return how much may be left of what was cut off; at night, everything."""
    every = 1 if at_night() else 7  # which is prime to the size of any number
    return sorted({*range(0, len(whole), every), len(whole) - 1})


def flips(begin, end, count):
    """Draw bits."""
    draw = random.Random(f"{begin} {end}")  # noqa: S311 - the same each time
    return [(draw.randrange(begin, end), draw.randrange(8)) for _ in range(count)]


def test_c7_every_flipped_bit_of_data_and_header(saved):
    """C7: of 800 drawn bits all are noticed; file and tensor are named."""
    path, state = saved / FILE, fresh()
    whole, file = path.read_bytes(), read_manifest(saved).files[FILE]
    first = min(each.begin for each in file.tensors.values())
    assert len(file.tensors) > 3
    for at, bit in flips(0, first, 400) + flips(first, len(whole), 400):
        changed = bytearray(whole)
        changed[at] ^= 1 << bit
        path.write_bytes(changed)
        within = [n for n, e in file.tensors.items() if e.begin <= at < e.end]
        (name,) = within or ["its header"]
        with pytest.raises(CheckpointCorruptError) as caught:
            af.load(state, saved)
        assert (
            f"{path} has changed since it was saved: the BLAKE3 digest of {name}"
            in str(caught.value)
        )


def test_c7_every_flipped_bit_of_a_manifest(tmp_path):
    """C7: of 800 drawn bits all are noticed, those of a number's `e` and an escape too."""
    state = made()
    state = state.with_slot("mine", [1e-300, "é\n", {"é": 5e-324}])
    af.save(state, tmp_path / "saved")
    path = tmp_path / "saved" / MANIFEST
    whole = path.read_bytes()
    for at, bit in flips(0, len(whole), 800):
        changed = bytearray(whole)
        changed[at] ^= 1 << bit
        path.write_bytes(changed)
        with pytest.raises(CheckpointError, match=str(path)):
            read_manifest(path.parent)


def test_c7_text_that_means_the_same(saved):
    """C7: a manifest in other words is not what was saved, whatever it means."""
    path = saved / MANIFEST
    text = path.read_text()
    for other in (text.replace("\n", ""), text + "\n", text.replace(": 0.9", ": 9e-1")):
        path.write_text(other)
        if other != text:
            with pytest.raises(CheckpointCorruptError, match=r"BLAKE3 digest differs"):
                read_manifest(saved)


def test_c7_digests_are_of_the_file(saved):
    """C7: each digest is of the file up to the end of a tensor, and they cover all of it."""
    for name, file in read_manifest(saved).files.items():
        content = (saved / name).read_bytes()
        begin = min(each.begin for each in file.tensors.values())
        assert blake3(content[:begin]).hexdigest() == file.header_blake3
        for each in file.tensors.values():
            assert blake3(content[: each.end]).hexdigest() == each.blake3
        assert blake3(content).hexdigest() == file.blake3
        assert max(each.end for each in file.tensors.values()) == len(content)


# C8: other formats.


class Payload:
    """An object whose unpickling makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def foreign(path, mark):
    """Return files of other formats, by name; those that run code make a file."""
    torch.save({"weight": torch.ones(2)}, path / "zip")
    torch.save({"w": torch.ones(2)}, path / "old", _use_new_zipfile_serialization=False)
    pickled = pickle.dumps(Payload(mark))
    return {
        "pickle": pickled,
        "old pickle": pickle.dumps(Payload(mark), protocol=0),
        "torch zip": (path / "zip").read_bytes(),
        "torch before 1.6": (path / "old").read_bytes(),
        "numpy": b"\x93NUMPY\x01\x00" + bytes(118),
        "gzip": b"\x1f\x8b\x08" + bytes(60),
        "HDF5": b"\x89HDF\r\n\x1a\n" + bytes(60),
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
        with pytest.raises(CheckpointCorruptError, match=re.escape(name)):
            af.load(state, saved, verify=verify)
        assert not mark.exists(), what


def test_c8_a_pickle_of_the_same_size(saved, tmp_path):
    """C8: nor does it run if it is as long as what it replaces, and is not verified."""
    size = (saved / FILE).stat().st_size
    (saved / FILE).write_bytes(pickle.dumps(Payload(tmp_path / "mark")).ljust(size))
    with pytest.raises(CheckpointCorruptError, match="header"):
        af.load(fresh(), saved)
    af.load(fresh(), saved, verify=False)
    assert not (tmp_path / "mark").exists()


def test_c8_no_code_is_ever_loaded():
    """C8: nothing that saves or loads checkpoints can unpickle, evaluate or import by name."""
    package = Path(af.__file__).parent
    sources = [*(package / "checkpoint").rglob("*.py"), package / "base" / "codec.py"]
    # torch_files.py reads what others pickled, as tensors and torch's records of them alone
    sources += {*package.glob("weights/*.py")} - {
        package / "weights" / "torch_files.py"
    }
    assert len(sources) > 15
    forbidden = (
        r"\bpickle\.\w|import pickle|(?<!safetensors\.)torch\.load\b|\beval\(|\bexec\("
        r"|__import__|import_module\(|marshal|shelve|(np|numpy)\.load\b"
    )
    found = [
        f"{path.name}: {line.strip()}"
        for path in sources
        for line in path.read_text().splitlines()
        if re.search(forbidden, line)
    ]
    assert found == []


# C9: names that lead elsewhere.

NASTY = [
    "../../x.safetensors",
    "../rank-00000.safetensors",
    "./rank-00000.safetensors",
    "/etc/passwd",
    "C:\\x.safetensors",
    "rank-00000.safetensors\0",
    "rank-00000.safetensors\n",
    "rank-00000.safetensors/",
    "rank-\u0660\u0660\u0660\u0660\u0660.safetensors",
    "rank-00007.safetensors",
    "RANK-00000.safetensors",
    "manifest.json",
    ".",
    "",
    "CON",
    "~/x",
]


@pytest.mark.parametrize("name", [*NASTY, "x" * 10_000])
def test_c9_nasty_names_of_files(name, saved):
    """C9: names of a checkpoint's own files alone are taken."""

    def rename(plain):
        plain["files"][name] = plain["files"].pop(FILE)

    reseal(saved, rename)
    with pytest.raises(CheckpointCorruptError, match=MANIFEST) as caught:
        af.load(fresh(), saved)
    assert len(str(caught.value)) < 1000


@given(st.text())
def test_c9_any_other_name_of_a_file(original, name):
    """C9: any other text is no file's name."""
    plain = plain_of(original)
    plain["files"] = {name: plain["files"][FILE]}
    if name != FILE:
        with pytest.raises(CheckpointCorruptError):
            Manifest.from_bytes(sealed(plain))


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
    with pytest.raises(CheckpointError, match=name):
        af.load(fresh(), saved)


# C10: files missing, added or swapped.


@pytest.mark.parametrize("gone", [0, 1])
def test_c10_a_missing_file(saved_of_two, gone):
    """C10: any missing file is named."""
    name = f"rank-{gone:05d}.safetensors"
    (saved_of_two / name).unlink()
    with pytest.raises(CheckpointCorruptError, match=rf"missing: \['{name}'\]"):
        read_manifest(saved_of_two)


def test_c10_an_extra_file(saved_of_two):
    """C10: a file too many is named; what is no file of tensors is let be."""
    (saved_of_two / "notes.txt").touch()
    load_of_two(saved_of_two)
    shutil.copy(saved_of_two / FILE, saved_of_two / "rank-00002.safetensors")
    with pytest.raises(CheckpointCorruptError, match=r"does not list \['rank-00002"):
        read_manifest(saved_of_two)


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
    with pytest.raises(CheckpointError, match=words):
        af.load(state, folder)
    cast = partial(af.load_part, state, folder, only=("buffers",), cast=True)
    if not torch.can_cast(saved, current):
        with pytest.raises(CheckpointError, match=words):
            cast()
        return
    loaded = cast()
    assert bits(mean.to(current)) == bits(loaded.state.buffers["mean"])
    assert loaded.cast == {"buffers.mean": f"saved as {saved}, expected {current}"}


def test_c11_a_cast_that_overflows(tmp_path):
    """C11: a finite value that the other dtype has not is refused by the tensor's name."""
    af.save(fresh(partial(Small, torch.tensor([1e6, math.inf]))), tmp_path / "saved")
    state = fresh(partial(Small, torch.zeros(2).half()))
    with pytest.raises(CheckpointError, match=r"mean.*float16"):
        af.load_part(state, tmp_path / "saved", only=("buffers",), cast=True)


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


def test_c12_the_nearest_name(tmp_path):
    """C12: beside a name that is missing stands the nearest of those that are not."""
    af.save(fresh(partial(Named, {"decoder_weight": 2, "x": 1})), tmp_path / "saved")
    state = fresh(partial(Named, {"decoder_weights": 2, "x": 1}))
    words = r"missing decoder_weights \(similar: decoder_weight\)"
    with pytest.raises(CheckpointError, match=words):
        af.load(state, tmp_path / "saved")


# C13 to C19: contents.


def round_trip(value, folder):
    """Return what comes back of a slot."""
    af.save(fresh().with_slot("mine", value), folder)
    return af.load(fresh(), folder).slots["mine"]


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


EMPTY = {
    "(0, 3)": torch.empty(0, 3),
    "(3, 0)": torch.empty(3, 0, 2),
    "0-d": torch.tensor(3.0),
    "0-d of an integer": torch.tensor(2**63 - 1),
    "dict": {},
    "nested": {"a": {}, "b": [], "c": (), "d": [{}, ()]},
    "none": None,
    "many without a byte": [torch.empty(0, i) for i in range(4)],
    "requires grad": torch.ones(2, requires_grad=True),
    "conjugate": torch.tensor([1 + 2j]).conj(),
    "negative": torch.tensor([1 + 2j]).conj().imag,
}


@pytest.mark.parametrize("case", EMPTY)
@pytest.mark.parametrize("verify", [True, False])
def test_c15_nothing_inside(case, verify, tmp_path):
    """C15: what has no element, or one, which may be a view, comes back as it was."""
    af.save(fresh().with_slot("mine", EMPTY[case]), tmp_path / "saved")
    loaded = af.load(fresh(), tmp_path / "saved", verify=verify)
    assert bits(EMPTY[case]) == bits(loaded.slots["mine"])


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
    with pytest.raises(CheckpointError, match=rf"slots\.mine.*{dtype}"):
        af.save(state, tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


class Own(torch.Tensor):
    """A tensor class of a user's."""


def unsaveable():
    """Return what has no values of its own that could be saved."""
    loop = []
    loop.append(loop)
    deep = torch.ones(1)
    for _ in range(200):
        deep = [deep]
    nested = torch._nested_tensor_from_tensor_list([torch.ones(1), torch.ones(2)])
    jagged = torch.nested.nested_tensor([torch.ones(1)], layout=torch.jagged)
    freed = torch.ones(5)
    freed.untyped_storage().resize_(0)
    with torch._subclasses.FakeTensorMode():
        fake = torch.ones(2)
    return {
        "meta": (torch.empty(2, device="meta"), "meta"),
        "fake": (fake, "FakeTensor"),
        "sparse": (torch.eye(2).to_sparse(), "sparse_coo.*to_dense"),
        "csr": (torch.sparse_csr_tensor([0, 1], [0], [1.0]), "sparse_csr"),
        "quantised": (
            torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8),
            "quant",
        ),
        "nested": (nested, "nested"),
        "jagged": (jagged, "nested"),
        "freed": (freed, "freed"),
        "a subclass": (torch.ones(2).as_subclass(Own), "Own"),
        "complex128": (
            torch.ones(1, dtype=torch.complex128),
            "complex128.*view_as_real",
        ),
        "itself": (loop, "contains itself"),
        "depth": (deep, "100 containers"),
        "a large integer": (10**4300, "integer of"),
        "a large key": ({10**4300: 1}, "integer of"),
    }


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("async_", [False, True])
def test_c17_without_values_of_its_own(tmp_path, async_):
    """C17: it is refused by its name with what to do, and nothing is left on the disk."""
    with af.CheckpointStore(tmp_path / "runs", async_=async_) as store:
        for what, (value, words) in unsaveable().items():
            state = fresh().with_slot("mine", {"inside": value})
            with pytest.raises(CheckpointError, match=rf"slots\.mine\.inside.*{words}"):
                store.save(state)
            assert store.steps == (), what
            with pytest.raises(CheckpointError, match=words):
                af.save(state, tmp_path / "saved")
            assert not (tmp_path / "saved").exists()


KEYS = st.one_of(
    st.text(st.characters(), max_size=20),
    st.sampled_from(
        [
            *("__metadata__", "", "a/b", "..", "<0>", "<1>", "a.b", "x" * 10_000),
            *("tensor", "dict", "float", "pairs"),
        ]
    ),
    st.integers(-(2**70), 2**70),
)


@given(st.dictionaries(KEYS, st.dictionaries(KEYS, st.integers(0, 3), max_size=3)))
def test_c19_names_of_any_kind(tmp_path_factory, names):
    """C19: what tensors and dicts are called comes back; no two become one."""
    value = {
        outer: {inner: torch.tensor([i]) for inner, i in inside.items()}
        for outer, inside in names.items()
    }
    back = round_trip(value, tmp_path_factory.mktemp("text") / "saved")
    assert bits(value) == bits(back)
    assert [type(key) for key in value] == [type(key) for key in back]


@given(st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=3, unique=True))
def test_c19_names_of_parameters(tmp_path_factory, names):
    """C19: parameters come back under whatever name a module takes."""
    folder = tmp_path_factory.mktemp("params") / "saved"
    bare = nn.Module()
    names = [name for name in names if "." not in name and not hasattr(bare, name)]
    model = partial(Named, {"p": 1, **{name: i for i, name in enumerate(names)}})
    state = fresh(model)
    af.save(state, folder)
    assert bits(state.params) == bits(af.load(fresh(model, seed=9), folder).params)


# C20, C24: manifests that are sealed, and wrong.


def nodes(plain, path=()):
    """Yield the path of every node below a root."""
    items = plain.items() if isinstance(plain, dict) else enumerate(plain)
    for key, value in items:
        yield (*path, key)
        if isinstance(value, (dict, list)):
            yield from nodes(value, (*path, key))


def parent_of(plain, path):
    """Return what holds a node."""
    for key in path[:-1]:
        plain = plain[key]
    return plain


FREE = {"data", "transforms", "optimizer", "persistent"}


def is_typed(path):
    """Whether a node may be of one kind alone."""
    slots = path[0].startswith("trees") and any(
        str(p).startswith("slots.") for p in path
    )
    return not (slots or "opt_state" in path or path[0] in FREE or path[-1] == 2)


@given(st.data())
def test_c20_any_other_kind(original_of_two, data):
    """C20: a node of another kind is refused as such, with its place."""
    plain = plain_of(original_of_two)
    typed = [path for path in nodes(plain) if path != ("blake3",) and is_typed(path)]
    path = data.draw(st.sampled_from(typed))
    parent, kinds = parent_of(plain, path), [None, True, -5, 0.5, "x", [[]], {"x": {}}]
    old = parent[path[-1]]
    other = data.draw(st.sampled_from([k for k in kinds if type(k) is not type(old)]))
    if path[0] == "metrics" and len(path) == 2:  # a number of either kind, or a name
        other = None
    parent[path[-1]] = other
    with pytest.raises(CheckpointCorruptError, match="expected|format"):
        Manifest.from_bytes(sealed(plain))


def entry_of(plain):
    """Return the first tensor's entry."""
    return next(iter(plain["files"][FILE]["tensors"].values()))


WRONG = {
    "a negative length": lambda p: entry_of(p).update(shape=[-1]),
    "a huge shape": lambda p: entry_of(p).update(shape=[2**62]),
    "a shape that overflows to nothing": lambda p: entry_of(p).update(
        shape=[2**32, 2**32]
    ),
    "a shape beyond 64 bits": lambda p: entry_of(p).update(shape=[2**70]),
    "a huge shape with a 0": lambda p: entry_of(p).update(shape=[2**62, 2**62, 0]),
    "too many dims": lambda p: entry_of(p).update(shape=[1] * 1000),
    "a length that is none": lambda p: entry_of(p).update(shape=[1.0]),
    "a true length": lambda p: entry_of(p).update(shape=[True]),
    "an unknown dtype": lambda p: entry_of(p).update(dtype="F4"),
    "a dtype that is no text": lambda p: entry_of(p).update(dtype=["F32"]),
    "another dtype": lambda p: entry_of(p).update(dtype="F64"),
    "an offset before": lambda p: entry_of(p).update(begin=0),
    "an offset behind": lambda p: entry_of(p).update(end=entry_of(p)["end"] + 4),
    "an offset beyond": lambda p: entry_of(p).update(begin=2**80, end=2**80),
    "a huge file": lambda p: p["files"][FILE].update(size=2**62),
    "no file": lambda p: p.update(files={}),
    "no tensors": lambda p: p["files"][FILE].update(tensors={}),
    "a world of none": lambda p: p.update(world_size=0),
    "a world of many": lambda p: p.update(world_size=10**18),
    "trees of other ranks": lambda p: p.update(trees_by_rank=[{}, {}]),
    "a field more": lambda p: p.update(extra=1),
    "a field less": lambda p: p.pop("kept"),
    "an unknown unit": lambda p: p["trees"].update(other=1),
    "no params": lambda p: p["trees"].pop("params"),
    "a negative step": lambda p: p["trees"].update(step=-1),
    "no position": lambda p: p["trees"].update(cursor={"list": [0]}),
    "a tensor that is nowhere": lambda p: p["trees"].update(
        {"slots.x": {"tensor": "nowhere"}}
    ),
    "an unknown kind": lambda p: p["trees"].update({"slots.x": {"set": []}}),
    "two kinds": lambda p: p["trees"].update({"slots.x": {"dict": {}, "list": []}}),
    "a bare list": lambda p: p["trees"].update({"slots.x": [1]}),
    "a key twice": lambda p: p["trees"].update(
        {"slots.x": {"pairs": [[1, 1], [1, 2]]}}
    ),
    "no float": lambda p: p["trees"].update({"slots.x": {"float": "1"}}),
    "no digest": lambda p: p["files"][FILE].update(blake3="0"),
    "no format": lambda p: p.update(format="1"),
    "a true format": lambda p: p.update(format=True),
    "as many copies as a number says": lambda p: p.update(copies=[10**12]),
    "a metric that is no float": lambda p: p.update(metrics={"loss": 10**400}),
    "the step of another update": lambda p: p.update(step=p["step"] + 1),
    "a step beyond 64 bits": lambda p: (
        p.update(step=2**80),
        p["trees"].update(step=2**80),
    ),
    "a file with a zero more in its name": lambda p: p["files"].update(
        {"rank-000000.safetensors": p["files"].pop(FILE)}
    ),
    "a whole without elements that has no size": lambda p: p["sharded"].update(
        x={"dtype": "F32", "shape": [0, 2**62, 2**62], "slices": {}}
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_c20_a_sealed_manifest_that_is_wrong(case, saved):
    """C20: what no save writes is refused before anything is read or made for it."""
    reseal(saved, WRONG[case])
    with pytest.raises(CheckpointCorruptError, match=MANIFEST):
        af.load(fresh(), saved)


def box(plain):
    """Return the second rank's slice of the sharded tensor."""
    return plain["sharded"]["slots.mine.w"]["slices"]["rank-00001.safetensors"]


SLICES = {
    "overlapping": lambda p: box(p).update(offset=[2]),
    "outside": lambda p: box(p).update(offset=[4]),
    "far outside": lambda p: box(p).update(offset=[2**62]),
    "of another size": lambda p: box(p).update(size=[2]),
    "of other dims": lambda p: box(p).update(offset=[3, 0], size=[3, 1]),
    "of too much": lambda p: p["sharded"]["slots.mine.w"].update(shape=[7]),
    "of very much": lambda p: p["sharded"]["slots.mine.w"].update(shape=[2**62]),
    "of another dtype": lambda p: p["sharded"]["slots.mine.w"].update(dtype="I32"),
    "missing": lambda p: p["sharded"]["slots.mine.w"]["slices"].popitem(),
    "of no file": lambda p: p["sharded"]["slots.mine.w"]["slices"].update(
        x={"offset": [6], "size": [0]}
    ),
    "of no tensor": lambda p: p["sharded"].update(x=p["sharded"].pop("slots.mine.w")),
}


@pytest.mark.parametrize("case", SLICES)
def test_c20_slices_that_are_no_whole(case, saved_of_two):
    """C20: slices that overlap, or leave something open, are refused by the manifest."""
    reseal(saved_of_two, SLICES[case])
    with pytest.raises(
        CheckpointCorruptError, match=r"manifest\.json.*('x'|slots\.mine\.w)"
    ):
        read_manifest(saved_of_two)


def saved_of_copies(folder):
    """Return a checkpoint of three copies of a split model, which have trained apart."""

    def save(world):
        setup = af.chain(af.wrap_fsdp(), af.local_sgd(sync_every=4))
        step = af.make_step(lambda model, batch: model(batch).square().mean())
        state = fresh(partial(nn.Linear, 2, 2), setup=setup, world=world)
        state, _ = step(state, torch.ones(2, 2) + world.rank)
        af.save(state, folder)

    simulate(6, save, axes={"dp_replicate": 3, "dp_shard": 2})
    return folder


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
def test_c20_copies_that_are_none(case, tmp_path):
    """C20: each copy of a model has all of it, and each rank a part of one."""
    saved = saved_of_copies(tmp_path / "saved")
    read_manifest(saved)
    reseal(saved, COPIES[case])
    with pytest.raises(CheckpointCorruptError, match=r"manifest\.json"):
        read_manifest(saved)


BOMBS = {
    "lists": b"[" * 1_000_000,
    "tables": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "a depth that json reads": b'{"format": 2, "data": '
    + b"[" * 900
    + b"]" * 900
    + b"}",
    "an integer": b'{"format": 2, "step": ' + b"9" * 100_000 + b"}",
    "an integer as its format": b'{"format": ' + b"9" * 100_000 + b"}",
    "a name twice": b'{"format": 2, "step": 1, "step": 2}',
    "a name a million times": b"{" + b'"a":0,' * 1_000_000 + b'"a":0}',
    "a million names": b'{"format": 2'
    + b"".join(b',"%d":0' % i for i in range(1_000_000))
    + b"}",
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


@pytest.mark.parametrize("case", BOMBS)
def test_c20_json_bombs(case, saved):
    """C20: JSON of any size and depth is refused by the manifest's name, in a moment."""
    (saved / MANIFEST).write_bytes(BOMBS[case])
    with pytest.raises(CheckpointCorruptError, match=MANIFEST):
        af.load(fresh(), saved)


@pytest.mark.parametrize("depth", [150, 400, 900])
def test_c20_sealed_depth(depth, saved):
    """C20: nothing lies deeper than what a save writes."""
    deep = 1
    for _ in range(depth):
        deep = {"list": [deep]}
    plain = plain_of(saved)
    plain["trees"]["slots.deep"] = "here"
    said = json.dumps(plain).replace(
        '"here"', '{"list": [' * depth + "1" + "]}" * depth
    )
    said = said.replace('"format"', '\n"format"').partition("\n")[2].encode()
    seal = blake3(said).hexdigest().encode()
    (saved / MANIFEST).write_bytes(b'{\n "blake3": "%s",\n' % seal + said)
    with pytest.raises(CheckpointCorruptError, match=MANIFEST):
        af.load(fresh(), saved)


def test_c20_sealed_containers(saved, monkeypatch):
    """C20: a manifest with too many lists and tables is neither read nor written."""
    monkeypatch.setattr("accelfn.checkpoint.manifest._MOST", 1000)
    plain = plain_of(saved)
    plain["trees"]["slots.x"] = {"list": [{"list": []}] * 2000}
    said = json.dumps({n: v for n, v in plain.items() if n != "blake3"}).encode()[1:]
    seal = blake3(said).hexdigest().encode()
    (saved / MANIFEST).write_bytes(b'{\n "blake3": "%s",\n' % seal + said)
    with pytest.raises(CheckpointCorruptError, match="lists and tables"):
        af.load(fresh(), saved)
    state = made().with_slot("mine", [[]] * 2000)
    with pytest.raises(CheckpointWriteError, match=r"lists and tables.*as a tensor"):
        af.save(state, saved.parent / "other")


def test_c20_an_error_is_short(saved):
    """C20: an error quotes the beginning of long facts of the data."""
    data = {f"x{i}": "y" * 10_000 for i in range(100)}
    reseal(saved, lambda plain: plain.update(data={"samples": 1, **data}))
    state = fresh(data=af.Data(torch.ones(4, 2), global_batch_size=2))
    with pytest.raises(CheckpointError, match="other data") as caught:
        af.load(state, saved)
    assert len(str(caught.value)) < 3000


def test_c20_no_memory_for_what_is_not_asked_for(tmp_path, monkeypatch):
    """C20: `verify` reads a tensor that nobody needs in pieces, and finds a changed bit."""
    monkeypatch.setattr("accelfn.checkpoint.files._BLOCK", 1000)
    af.save(made().with_slot("large", torch.arange(10_000.0)), tmp_path / "saved")
    sizes, empty = [], files.empty

    def seen(shape, dtype):
        tensor = empty(shape, dtype)
        sizes.append(tensor.nbytes)
        return tensor

    monkeypatch.setattr(files, "empty", seen)
    manifest.verify(tmp_path / "saved")
    assert max(sizes) <= 1000
    path = tmp_path / "saved" / FILE
    changed = bytearray(path.read_bytes())
    at = read_manifest(tmp_path / "saved").files[FILE].tensors["slots.large"].begin
    changed[at] ^= 1
    path.write_bytes(changed)
    with pytest.raises(CheckpointCorruptError, match=r"slots\.large differs"):
        manifest.verify(tmp_path / "saved")


def test_c20_a_manifest_of_many_bytes(saved):
    """C20: one longer than any that is written is refused before it is read."""
    with (saved / MANIFEST).open("r+b") as file:
        file.truncate(2**40)
    with pytest.raises(
        CheckpointCorruptError, match=rf"{2**40} bytes, and .* more than"
    ):
        af.load(fresh(), saved)


def test_c20_a_manifest_too_long_to_be_read_is_not_written(monkeypatch, tmp_path):
    """C20: so a checkpoint that was saved can be loaded."""
    monkeypatch.setattr("accelfn.checkpoint.manifest._LARGEST", 1000)
    with pytest.raises(CheckpointWriteError, match="manifest would have"):
        af.save(made(), tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def test_c20_many_tensors(tmp_path):
    """C20: ten thousand tensors come back, by name."""
    value = {f"t{i}": torch.tensor([i]) for i in range(10_000)}
    assert bits(value) == bits(round_trip(value, tmp_path / "saved"))


@pytest.mark.parametrize("version", [0, 1, 3, 99])
def test_c24_another_format(version, saved):
    """C24: the error has the number of the format, and the one that is read."""
    (saved / MANIFEST).write_text(json.dumps({"format": version, "other": []}))
    with pytest.raises(CheckpointError, match=rf"format {version}, .*reads format 2"):
        af.load(fresh(), saved)


@pytest.mark.parametrize("case", golden.CASES)
def test_c24_golden_checkpoints(case):
    """C24: what an earlier version wrote loads bitwise, for ever."""
    expected = json.loads((golden.FOLDER / f"{case}.json").read_text())
    assert expected == golden.loaded(case, golden.FOLDER / case)
