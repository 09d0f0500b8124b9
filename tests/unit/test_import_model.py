# SPDX-License-Identifier: Apache-2.0
"""`import_model` and `import_torch_weights`: what anyone wrote, or refused before a change."""

import json
import pickle
import re
import struct
import zipfile
from collections import OrderedDict
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import accelfn as af
from accelfn.errors import (
    ArgumentError,
    CheckpointCorruptError,
    CheckpointError,
    Error,
    ModelError,
)
from tests.checkpoints import Bomb
from tests.internals import placement
from tests.real_models import DECODER
from tests.states import linear_state


class Net(nn.Module):
    """A model with a tie, a persistent integer and batch statistics."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 5)
        self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(self.norm(self.embed(x)))


class Rotary(nn.Linear):
    """A model with a buffer that no file has."""

    def __init__(self):
        super().__init__(2, 2)
        self.register_buffer("angles", torch.ones(2), persistent=False)


def values(model):
    return {n: t.detach().clone() for n, t in model.state_dict().items()}


def whole(model):
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def same(one, two):
    return one.keys() == two.keys() and all(
        one[n].dtype == two[n].dtype and torch.equal(one[n], two[n]) for n in one
    )


def on(device, make):
    """Return a model that is made on a device."""
    with torch.device(device):
        return make()


def saved(model, path, **changes):
    """Write a model's state dict, each tied tensor once, with some entries changed."""
    held, seen = {}, set()
    for name, tensor in model.state_dict().items():
        if tensor.numel() == 0 or tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            held[name] = tensor.clone()
    held = {n: t.contiguous() for n, t in {**held, **changes}.items() if t is not None}
    safetensors.torch.save_file(held, path)
    return path


def parts(model, folder, kind="safetensors"):
    """Write a model's state dict as two files and their index."""
    held = {n: t for n, t in values(model).items() if n != "head.weight"}
    stem, save = "model", safetensors.torch.save_file
    if kind == "bin":
        stem, save = "pytorch_model", torch.save
    files = [f"{stem}-0000{i}-of-00002.{kind}" for i in (1, 2)]
    places = {name: files[i % 2] for i, name in enumerate(sorted(held))}
    folder.mkdir()
    for file in files:
        save({n: held[n] for n in held if places[n] == file}, folder / file)
    index = folder / f"{stem}.{kind}.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return index


@pytest.fixture(params=["file", "folder", "index", "folder of shards", "link"])
def source(request, tmp_path):
    """Return a model, and where its weights are."""
    torch.manual_seed(1)
    model = Net()
    model(torch.tensor([1, 2, 3]))
    match request.param:
        case "file":
            return model, saved(model, tmp_path / "any.safetensors")
        case "folder":
            saved(model, tmp_path / "model.safetensors")
            return model, tmp_path
        case "link":  # as the cache of Hugging Face's hub has them
            saved(model, tmp_path / "blob.safetensors").rename(tmp_path / "0a1b")
            (tmp_path / "snapshot").mkdir()
            (tmp_path / "snapshot/model.safetensors").symlink_to("../0a1b")
            return model, tmp_path / "snapshot"
        case "index":
            return model, parts(model, tmp_path / "model")
    parts(model, tmp_path / "model")
    return model, str(tmp_path / "model")


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_every_kind_of_source_is_read(source, device):
    """A file, a folder, an index, and links to them give every tensor and tie."""
    expected, where = source
    model = on(device, Net)
    assert af.import_model(model, where) is model
    assert same(values(expected), values(model))
    assert model.head.weight is model.embed.weight
    assert all(param.requires_grad for param in model.parameters())
    model(torch.tensor([1, 2])).sum().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_has_memory_keeps_it(tmp_path, dtype):
    """An optimizer over a model's parameters goes on with what is read, or converted, into it."""
    path = saved(Net().to(dtype), tmp_path / "a.safetensors")
    model = Net()
    before = {n: (p, p.data_ptr()) for n, p in model.named_parameters()}
    af.import_model(model, path)
    assert before.keys() == dict(model.named_parameters()).keys()
    for name, param in model.named_parameters():
        assert param is before[name][0]
        assert param.data_ptr() == before[name][1]


@pytest.mark.parametrize("into", ["factory", "values"])
@pytest.mark.parametrize(
    ("there", "here"), [(torch.float32, torch.bfloat16), (torch.float16, torch.float64)]
)
def test_what_is_converted_piece_by_piece_is_all_there(tmp_path, there, here, into):
    """Bitwise what torch converts at once, over several pieces and a shorter last one."""
    layer = partial(nn.Linear, 2**17 + 1, 5, dtype=here)
    drawn = nn.Linear(2**17 + 1, 5, dtype=there)
    path = saved(drawn, tmp_path / "a.safetensors")
    model = af.import_model(layer if into == "factory" else layer(), path)
    assert torch.equal(drawn.weight.to(here), model.weight)
    assert torch.equal(drawn.bias.to(here), model.bias)


def test_memory_in_another_order_is_filled(tmp_path):
    """A parameter that is a transposed view has the file's values, where it lies."""
    path = saved(nn.Linear(3, 2), tmp_path / "a.safetensors")
    model = nn.Linear(3, 2)
    model.weight = nn.Parameter(torch.zeros(3, 2).t())
    before = model.weight.data_ptr()
    af.import_model(model, path)
    assert torch.equal(safetensors.torch.load_file(path)["weight"], model.weight)
    assert model.weight.data_ptr() == before


def test_a_graph_of_what_was_there_is_told(tmp_path):
    """torch refuses a backward pass through values that an import has replaced."""
    path = saved(nn.Linear(3, 2), tmp_path / "a.safetensors")
    model = nn.Linear(3, 2)
    loss = model(torch.ones(1, 3, requires_grad=True)).sum()
    af.import_model(model, path)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_what_was_read_does_not_depend_on_the_file(device, tmp_path):
    """The file may be overwritten and removed: the model's tensors are its own."""
    torch.save(values(Net()), tmp_path / "a.pt")
    saved(Net(), tmp_path / "a.safetensors")
    for read, name in (
        (af.import_model, "a.safetensors"),
        (af.import_torch_weights, "a.pt"),
    ):
        path = tmp_path / name
        model = read(on(device, Net), path)
        before = values(model)
        path.write_bytes(b"\xff" * path.stat().st_size)
        path.unlink()
        assert same(before, values(model))


def test_either_name_of_a_tie_will_do(tmp_path):
    """A file has a tied weight under its first name, its second, or both."""
    weight = torch.randn(5, 3)
    held = {n: t for n, t in values(Net()).items() if "weight" not in n or "norm" in n}
    for names in (["embed.weight"], ["head.weight"], ["embed.weight", "head.weight"]):
        both = {name: weight.clone() for name in names}
        safetensors.torch.save_file({**held, **both}, tmp_path / "a.safetensors")
        for device in ("cpu", "meta"):
            model = af.import_model(on(device, Net), tmp_path / "a.safetensors")
            assert torch.equal(weight, model.embed.weight)
            assert model.head.weight is model.embed.weight


def test_names_of_a_tie_that_differ_are_refused(tmp_path):
    """A file of an untied model does not fit a tied one, unless the first is to count."""
    one, two = torch.ones(5, 3), torch.zeros(5, 3)
    held = {**values(Net()), "embed.weight": one, "head.weight": two}
    safetensors.torch.save_file(held, tmp_path / "a.safetensors")
    model = Net()
    before = values(model)
    expected = "embed.weight and head.weight are one tied tensor in the model"
    with pytest.raises(CheckpointError, match=expected):
        af.import_model(model, tmp_path / "a.safetensors")
    assert same(before, values(model))
    with pytest.warns(UserWarning, match=expected):
        af.import_model(model, tmp_path / "a.safetensors", strict=False)
    assert torch.equal(one, model.head.weight)


class Twice(nn.Module):
    """A module whose own tensors have two names each."""

    def __init__(self, *, persistent):
        super().__init__()
        self.first = nn.Parameter(torch.ones(2))
        self.second = self.first
        self.register_buffer("seen_first", torch.ones(2), persistent=persistent)
        self.register_buffer("seen_second", self.seen_first, persistent=persistent)


@pytest.mark.parametrize("dtype", [None, torch.float64])
@pytest.mark.parametrize("persistent", [True, False])
@pytest.mark.parametrize("way", ["cpu", "meta", "empty", "factory"])
def test_two_names_in_one_module_are_one_tensor(way, persistent, dtype, tmp_path):
    """Parameters and buffers, saved or not, have their values under either of the names."""
    if way == "meta" and not persistent:
        return  # nobody could say what its values are
    held = {"first": torch.tensor([2.0, 3.0])}
    if persistent:
        held["seen_second"] = torch.tensor([4.0, 5.0])
    safetensors.torch.save_file(held, tmp_path / "a.safetensors")
    ways = {"meta": torch.device("meta"), "empty": af.empty_weights()}
    make = partial(Twice, persistent=persistent)
    with ways.get(way, nullcontext()):
        model = make if way == "factory" else make()
    model = af.import_model(model, tmp_path / "a.safetensors", dtype=dtype)
    assert model.first is model.second
    assert model.first.tolist() == [2.0, 3.0]
    assert model.seen_first is model.seen_second
    assert model.seen_first.tolist() == ([4.0, 5.0] if persistent else [1.0, 1.0])
    assert model.first.dtype is (dtype or torch.float32)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float64])
def test_a_dtype_is_for_floating_point(device, dtype, tmp_path):
    """Weights get the dtype asked for, by default the model's; integers stay."""
    half = saved(Net().half(), tmp_path / "a.safetensors")
    model = af.import_model(on(device, Net), half, dtype=dtype)
    for name, tensor in safetensors.torch.load_file(half).items():
        integer, found = not tensor.is_floating_point(), model.state_dict()[name]
        as_asked = tensor if integer else tensor.to(dtype or torch.float32)
        assert found.dtype is as_asked.dtype
        assert torch.equal(as_asked, found)


def test_the_longest_prefix_says_the_device():
    """A whole part of a name counts, and the longest of those that do."""
    devices = {"": "cuda:0", "norm": "cuda:1", "norm.bias": torch.device("cuda:2")}
    model = nn.ModuleDict({"normal": nn.Linear(1, 1), "norm": nn.BatchNorm1d(1)})
    found = placement("af.import_model", model, devices, None)
    names = "head.weight", "norm.weight", "norm.bias", "normal.weight"
    places = [str(found.device(name, torch.empty(1))) for name in names]
    assert places == ["cuda:0", "cuda:1", "cuda:2", "cuda:0"]


def test_what_no_prefix_names_stays():
    """It is filled where it is, or comes from meta to the CPU."""
    found = placement("af.import_model", nn.Linear(1, 1), {"bias": "cuda:0"}, None)
    for own, device in (("cpu", "cpu"), ("cuda:1", "cuda:1"), ("meta", "cpu")):
        with FakeTensorMode():  # on whatever device, though it is not here
            old = torch.empty(1, device=own)
            assert found.device("weight", old) == torch.device(device)


@pytest.mark.gpu
def test_modules_go_to_several_devices(tmp_path):
    """The longest prefix counts, for buffers that no file has too; from anywhere."""
    model = nn.Sequential(Rotary(), nn.ModuleList([Rotary(), Rotary()]))
    path = saved(model, tmp_path / "a.safetensors")
    place = {"": "cuda:0", "1.1": "cpu", "1.1.weight": 0}
    af.import_model(model, path, device_map=place)
    on_cpu = {name for name, each in whole(model).items() if each.device.type == "cpu"}
    assert on_cpu == {"1.1.bias", "1.1.angles"}


OPTIONS = [
    ({"device_map": "auto"}, "expected a dict from module names to devices"),
    ({"device_map": {"": "disk"}}, "device_map={'': 'disk'}"),
    ({"device_map": {"": "meta"}}, "meta tensors have no values"),
    ({"device_map": {"nor": "cpu"}}, "no module of this name.*embed, norm, head"),
    ({"dtype": torch.int64}, "expected a floating-point dtype"),
    ({"dtype": "bfloat16"}, "expected a floating-point dtype"),
]


@pytest.mark.parametrize(("options", "expected"), OPTIONS)
@pytest.mark.parametrize("read", [af.import_model, af.import_torch_weights])
def test_options_without_meaning_are_refused(options, expected, read, tmp_path):
    """The error names the function, the option and what it was given."""
    with pytest.raises(ArgumentError, match=expected) as error:
        read(Net(), tmp_path / "not there", **options)
    assert f"af.{read.__name__}(" in str(error.value)


COUNT = "norm.num_batches_tracked"
CHANGES = [
    ({"norm.bias": None}, "missing norm.bias"),
    ({"extra": torch.ones(1)}, "unexpected extra"),
    ({"head.bias": None, "haed.bias": torch.ones(5)}, r"head.bias \(similar: haed.b"),
    ({"norm.bias": torch.ones(4)}, r"saved as \(4,\).*expected \(3,\)"),
    ({COUNT: torch.tensor(1.0)}, "float32, expected .*int64"),
    ({COUNT: torch.tensor(1, dtype=torch.int32)}, "int32, expected .*int64"),
    ({"norm.bias": torch.ones(3, dtype=torch.int64)}, "int64, expected .*float32"),
]


@pytest.mark.parametrize(("changes", "expected"), CHANGES)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_what_does_not_fit_is_refused_whole(changes, expected, device, tmp_path):
    """Names, shapes and kinds are compared before the first tensor is touched."""
    path, model = saved(Net(), tmp_path / "a.safetensors", **changes), on(device, Net)
    before = {n: (t, t.detach().clone()) for n, t in model.named_parameters()}
    with pytest.raises(CheckpointError, match=expected) as error:
        af.import_model(model, path)
    assert "differ from the model's" in str(error.value)
    for name, (tensor, copy) in before.items():
        now = model.get_parameter(name)
        assert now is tensor
        assert device == "meta" or torch.equal(now, copy)


def test_a_loose_import_says_what_is_left(tmp_path):
    """strict=False warns of both kinds of names, takes the rest, and refuses shapes still."""
    changes = {"norm.bias": None, "extra": torch.ones(1)}
    path, model = saved(Net(), tmp_path / "a.safetensors", **changes), Net()
    model.norm.bias.data += 7
    words = "(?s)differ from the model's.*missing norm.bias.*unexpected extra"
    with pytest.warns(UserWarning, match=words) as warned:
        af.import_model(model, path, strict=False)
    assert Path(warned[0].filename) == Path(__file__)
    assert torch.equal(torch.full((3,), 7.0), model.norm.bias)
    held = safetensors.torch.load_file(path)
    assert torch.equal(held["embed.weight"], model.embed.weight)
    path = saved(Net(), tmp_path / "b.safetensors", **{"norm.bias": torch.ones(4)})
    with pytest.raises(CheckpointError, match="norm.bias saved as"):
        af.import_model(model, path, strict=False)


def test_a_buffer_that_no_file_has_is_refused_on_meta(tmp_path):
    """It is named with the remedy, before anything is read; the remedy helps."""
    path = saved(Rotary(), tmp_path / "a.safetensors")
    model = on("meta", Rotary)
    words = r"angles: on the meta device.*af\.import_model\(lambda: Net"
    with pytest.raises(ModelError, match=words):
        af.import_model(model, path)
    assert model.weight.is_meta
    model.register_buffer("angles", torch.ones(2), persistent=False)
    af.import_model(model, path)
    assert not any(t.is_meta for t in [*model.parameters(), *model.buffers()])
    assert af.import_model(Rotary(), path).angles.tolist() == [1, 1]


def test_a_lazy_model_is_refused(tmp_path):
    """Its parameters have no shape to compare."""
    path = saved(nn.Linear(2, 2), tmp_path / "a.safetensors")
    with pytest.raises(ModelError, match="weight is a lazy"):
        af.import_model(nn.LazyLinear(2), path)


def test_what_was_said_of_a_parameter_stays(tmp_path):
    """What is frozen on meta, and marked, is so with values; the caller's modes change nothing."""
    path = saved(nn.Linear(2, 2), tmp_path / "a.safetensors")
    model = on("meta", partial(nn.Linear, 2, 2))
    model.weight.requires_grad_(requires_grad=False)
    model.weight.group = "no decay"
    with torch.inference_mode():
        af.import_model(model, path)
    assert not model.weight.requires_grad
    assert getattr(model.weight, "group", None) == "no decay"
    model(torch.ones(1, 2)).sum().backward()
    assert model.bias.grad is not None


READ = {"safetensors": af.import_model, "bin": af.import_torch_weights}


def refused(source, kind=CheckpointError, *, read=af.import_model):
    """Return why a source is refused, of which the model sees nothing."""
    model = nn.Linear(2, 2)
    before = values(model)
    with pytest.raises(kind) as error:
        read(model, source)
    assert same(before, values(model))
    return str(error.value)


def test_where_there_is_nothing_says_what_to_do(tmp_path):
    """Folders of other kinds are sent to the function that reads them."""
    assert "neither model.safetensors nor" in refused(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    assert "af.import_torch_weights" in refused(tmp_path)


def another(name):
    """Return a change of an index, which has a tensor in another file."""
    return lambda places: {**places, "bias": name}


ELSEWHERE = (
    *("../a.safetensors", "/a.safetensors", "b/a.safetensors", "a\0.safetensors"),
    *("C:\\a.safetensors", "../a.bin", "a.other", "..", "", 3, None),
)
INDEXES = [
    *((another(name), f"'bias' is in {name!r}, which is not") for name in ELSEWHERE),
    (another("a"), "does not exist"),
    (lambda places: {**places, "bias": places["weight"]}, "has no such tensor"),
    (lambda places: {**places, "more": places["bias"]}, "has no such tensor"),
    (lambda _: [], "is not an index"),
]


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
@pytest.mark.parametrize(("change", "said"), INDEXES, ids=range(len(INDEXES)))
def test_an_index_is_true(change, said, kind, tmp_path):
    """It names files of its kind beside it, which have the tensors that it says."""
    index = parts(nn.Linear(2, 2), tmp_path / "model", kind)
    saved(nn.Linear(2, 2), tmp_path / "a.safetensors")
    places = change(json.loads(index.read_text())["weight_map"])
    if isinstance(places, dict) and places["bias"] == "a":
        places["bias"] = f"a.{kind}"
    index.write_text(json.dumps({"weight_map": places}))
    assert said in refused(index.parent, read=READ[kind])


def test_what_an_index_does_not_name_is_not_passed_over(tmp_path):
    """A tensor of which it says nothing is unexpected; what is no index is damaged."""
    index = parts(nn.Linear(2, 2), tmp_path / "model")
    held = {"bias": torch.ones(2), "extra": torch.ones(1)}
    place = json.loads(index.read_text())["weight_map"]["bias"]
    safetensors.torch.save_file(held, index.with_name(place))
    assert "unexpected extra" in refused(index)
    for text in ("", "[]", "{}", '{"weight_map": []}', "\xff", "[" * 100_000):
        index.write_text(text, encoding="latin-1")
        assert str(index) in refused(index, CheckpointCorruptError)


def header(entries, data=b"\0" * 24):
    """Return a safetensors file with a header of one's own."""
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text + data


W = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}
B = {"dtype": "F32", "shape": [2], "data_offsets": [16, 24]}


def test_the_headers_below_are_right_but_for_one_thing(tmp_path):
    """As they stand they are read."""
    (tmp_path / "a.safetensors").write_bytes(header({"weight": W, "bias": B}))
    model = af.import_model(nn.Linear(2, 2), tmp_path / "a.safetensors")
    assert model.weight.tolist() == [[0, 0], [0, 0]]


def both(weight=(0, 16), bias=(16, 24), size=24, **change):
    """Return a file whose tensors lie at some bytes, of whose bias something else is wrong."""
    held = {
        "weight": {**W, "data_offsets": [*weight]},
        "bias": {**B, "data_offsets": [*bias], **change},
    }
    return header(held, b"\0" * size)


NO_FILES = [
    *(b"", b"1234567"),
    *(struct.pack("<Q", 2**power) + b"{}" for power in (40, 63)),
    *map(header, (b"[]", b"{", b"\xff\xfe", b"[" * 100_000)),
    header(b'{"weight": %s, "weight": %s}' % ((json.dumps(W).encode(),) * 2)),
    *(both(size=23), both(size=25), both(bias=(8, 16)), both(bias=(17, 25), size=25)),
    *(both(bias=(16, 20), size=20), both(bias=(16.0, 24.0)), both(bias=(16,))),
    *(both((8, 24), (24, 32), size=32), both((-16, 0))),
    *(both(shape=shape) for shape in ([3], [-2], "2")),
    both(dtype=["F32"]),
    header({"weight": W, "bias": {"dtype": "F32"}}),
    header({"weight": W, "bias": 3}),
    header({"bias": {**B, "data_offsets": [8, 16]}}, b"\0" * 16),
    pickle.dumps({"weight": 1}),
]


@pytest.mark.parametrize("data", NO_FILES, ids=range(len(NO_FILES)))
def test_what_is_no_safetensors_file_is_refused(data, tmp_path):
    """Cut off, too long, overlapping, with holes, of wrong types: the file is named."""
    path = tmp_path / "a.safetensors"
    path.write_bytes(data)
    assert str(path) in refused(path, CheckpointCorruptError)


def test_a_dtype_that_torch_lacks_is_named(tmp_path):
    """A format beyond what is read here is no damage, and is called by its name."""
    odd = {"dtype": "F4", "shape": [4], "data_offsets": [16, 18]}
    path = tmp_path / "a.safetensors"
    path.write_bytes(header({"weight": W, "bias": odd}, b"\0" * 18))
    assert "'bias' has the dtype 'F4'" in refused(path)


def test_a_directory_is_no_file(tmp_path):
    """A folder with a file's name is looked into as a folder."""
    (tmp_path / "model.safetensors").mkdir()
    assert "cannot be read" in refused(tmp_path, CheckpointCorruptError)


@pytest.fixture
def accelerator():
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState, PartialState

    yield Accelerator(cpu=True)
    for each in (AcceleratorState, GradientState, PartialState):
        each._reset_state()


@pytest.mark.parametrize("size", ["10GB", 100])
def test_what_accelerate_saves_is_read(size, accelerator, tmp_path):
    """`save_model`, whole or in shards, with a tied weight and one that shares memory."""

    def make():
        model = nn.ModuleDict({"net": Net(), "twin": nn.Linear(3, 5)})
        model["twin"].bias = nn.Parameter(model["net"].head.bias.data)
        return model

    model = make()
    accelerator.save_model(model, tmp_path / "model", max_shard_size=size)
    shards = len(list((tmp_path / "model").glob("model-*.safetensors")))
    assert (shards > 1) == (size == 100)
    found = af.import_model(make(), tmp_path / "model")
    assert same(values(model), values(found))
    assert found["net"].head.weight is found["net"].embed.weight


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("how", ["zip", "old", "parts", "index of parts", "folder"])
@pytest.mark.parametrize("dtype", [None, torch.float64])
def test_what_torch_saves_is_read(device, how, dtype, tmp_path):
    """A state dict, in either format of torch's or in parts, gives what its safetensors would."""
    model, source = Net(), tmp_path / "a.pt"
    model(torch.tensor([1, 2, 3]))
    held = model.state_dict()
    if "parts" in how:
        source = parts(model, tmp_path / "parts", "bin")
        source = source.parent if how == "parts" else source
    elif how == "folder":
        torch.save(held, tmp_path / "pytorch_model.bin")
        source = tmp_path
    else:
        torch.save(held, source, _use_new_zipfile_serialization=how == "zip")
    file = saved(model, tmp_path / "a.safetensors")
    one = af.import_torch_weights(on(device, Net), source, dtype=dtype)
    two = af.import_model(on(device, Net), file, dtype=dtype)
    assert same(values(two), values(one))
    assert one.head.weight is one.embed.weight
    one(torch.tensor([1, 2])).sum().backward()


def test_torch_weights_are_compared_alike(tmp_path):
    """Names and shapes that differ are refused, or said, as by `import_model`."""
    held = {**values(nn.Linear(2, 2)), "extra": torch.ones(1)}
    torch.save(held, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match="unexpected extra"):
        af.import_torch_weights(nn.Linear(2, 2), tmp_path / "a.pt")
    with pytest.warns(UserWarning, match="unexpected extra"):
        af.import_torch_weights(nn.Linear(2, 2), tmp_path / "a.pt", strict=False)


@pytest.mark.parametrize("write", ["pickle", "torch", "parts"])
def test_code_in_a_file_is_not_run(write, tmp_path):
    """A pickle that would make a file is refused, and has made none."""
    path, mark = tmp_path / "a.pt", tmp_path / "made"
    held = OrderedDict(weight=torch.ones(2, 2), bias=Bomb(mark))
    if write == "pickle":
        path.write_bytes(pickle.dumps(held, protocol=2))
    else:
        torch.save(held, path)
    if write == "parts":
        index = parts(nn.Linear(2, 2), tmp_path / "parts", "bin")
        path = path.rename(index.with_name("pytorch_model-00002-of-00002.bin"))
    source = index if write == "parts" else path
    assert str(path) in refused(source, read=af.import_torch_weights)
    assert not mark.exists()


@pytest.mark.parametrize(
    ("held", "expected"),
    [
        ([torch.ones(1)], "contains a list"),
        ({"model": {"weight": torch.ones(2, 2)}}, "'model' .dict. is not a dense"),
        ({0: torch.ones(2)}, "0 .torch.strided tensor. is not a dense tensor, or"),
        ({"weight": torch.ones(2, 2).to_sparse()}, "sparse_coo"),
    ],
)
def test_what_is_no_state_dict_is_refused(held, expected, tmp_path):
    """A file of something else says of what, and what to save."""
    torch.save(held, tmp_path / "a.pt")
    assert re.search(expected, refused(tmp_path / "a.pt", read=af.import_torch_weights))


@pytest.mark.parametrize("kind", READ)
def test_a_file_that_is_cut_off_is_refused(kind, tmp_path):
    """At any length it is refused, and so is none, by name."""
    path, save = tmp_path / f"a.{kind}", torch.save
    assert "does not exist" in refused(path, read=READ[kind])
    if kind == "safetensors":
        save = safetensors.torch.save_file
    save(nn.Linear(2, 2).state_dict(), path)
    whole = path.read_bytes()
    for length in range(0, len(whole), 1 if kind == "safetensors" else 37):
        path.write_bytes(whole[:length])
        assert str(path) in refused(path, read=READ[kind])


@pytest.mark.parametrize("parts", ["all", "pickle"])
def test_a_compressed_zip_is_refused_by_its_directory(parts, tmp_path):
    """torch compresses nothing, and reads what others did into all memory."""
    torch.save({"weight": torch.zeros(1000), "bias": torch.zeros(1)}, tmp_path / "a.pt")
    with (
        zipfile.ZipFile(tmp_path / "a.pt") as plain,
        zipfile.ZipFile(tmp_path / "b.pt", "w") as packed,
    ):
        for name in plain.namelist():
            is_packed = parts == "all" or name.endswith("data.pkl")
            kind = zipfile.ZIP_DEFLATED if is_packed else zipfile.ZIP_STORED
            packed.writestr(name, plain.read(name), kind)
    with pytest.raises(CheckpointCorruptError, match=r"b\.pt.*is compressed"):
        af.import_torch_weights(nn.Linear(1000, 1), tmp_path / "b.pt")


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_a_tensor_is_read_where_the_index_says(kind, tmp_path):
    """Of one that lies in two files, that of the file which the index names."""
    model, read = nn.Linear(2, 2), af.import_model
    load, save = safetensors.torch.load_file, safetensors.torch.save_file
    if kind == "bin":
        load, save, read = torch.load, torch.save, af.import_torch_weights
    index = parts(model, tmp_path / "model", kind)
    for file in index.parent.glob(f"*.{kind}"):
        own = load(file)
        stale = {n: t + 1 for n, t in values(model).items() if n not in own}
        save({**own, **stale}, file)
    assert same(values(model), values(read(nn.Linear(2, 2), index)))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_tensors_without_elements_are_not_tied(device, tmp_path):
    """Several of one shape lie at one address, and each is imported under its own name."""

    def model():
        empty = {"a": torch.empty(0, 2), "b": torch.empty(0, 2), "c": torch.tensor(2.5)}
        return nn.ParameterDict(empty)

    saved(model(), tmp_path / "model.safetensors")
    into = model().to(device)
    af.import_model(into, tmp_path)
    assert same(values(model()), values(into))
    assert into["a"] is not into["b"]
    held = {"a": torch.empty(0, 2), "c": torch.tensor(2.5)}
    safetensors.torch.save_file(held, tmp_path / "lacking.safetensors")
    with pytest.raises(Error, match="missing b"):
        af.import_model(model().to(device), tmp_path / "lacking.safetensors")


class Turned(nn.Module):
    """A model with angles that no file has, a table that one has, and maybe a tie."""

    def __init__(self, width, base=10_000.0, *, tied=False, once=False):
        super().__init__()
        weight = nn.Parameter(torch.randn(width, width))
        self.register_parameter("first", weight)
        if once:  # one Python object in two places
            self.register_parameter("second", weight)
        else:
            other = self.first if tied else nn.Parameter(torch.randn(width, width))
            self.second = other
        angles = base ** -(torch.arange(width) / width)
        self.register_buffer("angles", angles, persistent=False)
        self.register_buffer("table", torch.randn(width))

    def forward(self, x):
        return x @ self.first * self.angles.cos() @ self.second + self.table


@given(
    width=st.integers(1, 5),
    base=st.floats(1.5, 1e6),
    tied=st.booleans(),
    once=st.booleans(),
    by_torch=st.booleans(),
)
def test_a_factory_s_model_is_the_real_one(
    tmp_path_factory, width, base, tied, once, by_torch
):
    """Section D: import_model(factory) has what the real model has, buffers too, bitwise."""

    def make():
        return Turned(width, base, tied=tied, once=once)

    model, folder = make(), tmp_path_factory.mktemp("a")
    if by_torch:
        torch.save(model.state_dict(), folder / "a.bin")
        found = af.import_torch_weights(make, folder / "a.bin")
    else:
        found = af.import_model(make, saved(model, folder / "a.safetensors"))
    assert same(whole(model), whole(found))
    assert (found.first is found.second) == (tied or once)
    x = torch.randn(2, width)
    assert torch.equal(model(x), found(x))
    assert not any(each.is_meta for each in whole(found).values())


def test_a_factory_s_parameters_have_no_memory(tmp_path):
    """Only parameters are without, and only while the factory runs, also if it fails."""
    seen, path = {}, saved(Turned(3), tmp_path / "a.safetensors")

    def make(*, fails=False):
        model = Turned(3)
        seen.update({name: each.device.type for name, each in whole(model).items()})
        return 1 / 0 if fails else model

    af.import_model(make, path)
    meta = {name for name, device in seen.items() if device == "meta"}
    assert meta == {"first", "second"}
    assert not nn.Linear(1, 1).weight.is_meta
    with pytest.raises(ZeroDivisionError):
        af.import_model(partial(make, fails=True), path)
    assert not nn.Linear(1, 1).weight.is_meta


@pytest.mark.parametrize("read", [af.import_model, af.import_torch_weights])
def test_what_makes_no_model_is_refused(read, tmp_path):
    """Section C: junk in the place of a model is named, and so is a factory of another."""
    for value in (None, 3, "net", {}):
        with pytest.raises(ModelError, match="expected a torch.nn.Module, or a func"):
            read(value, tmp_path)
    with pytest.raises(ModelError, match=r"arguments.*functools.partial\(Linear"):
        read(nn.Linear, tmp_path)
    with pytest.raises(ModelError, match="it returned int"):
        read(lambda: 3, tmp_path)


@pytest.mark.parametrize("name", ["Llama", "Phi"])
@pytest.mark.parametrize("way", ["factory", "part of another"])
def test_a_rotary_model_on_meta_is_the_real_one(name, way, tmp_path):
    """Section D: the logits of what import_model made without memory are the real model's."""
    import transformers

    config = getattr(transformers, f"{name}Config")(**DECODER)
    make = partial(getattr(transformers, f"{name}ForCausalLM"), config)
    torch.manual_seed(1)
    model = make().eval()
    if way == "factory":
        model.save_pretrained(tmp_path)
        found = af.import_model(make, tmp_path)
    else:
        saved(nn.ModuleDict({"net": model}), tmp_path / "model.safetensors")
        empty = on("meta", lambda: nn.ModuleDict({"net": make()}))
        found = af.import_model(empty, tmp_path)["net"]
    ids = torch.arange(10).reshape(2, 5)
    assert torch.equal(model(ids).logits, found.eval()(ids).logits)
    assert same(whole(model), whole(found))


def test_what_another_function_reads_is_sent_there(tmp_path):
    """Section D: each of load, import_model and import_torch_weights names the others."""

    def create():
        return linear_state(2, 2, optimizer=lambda named: torch.optim.SGD(named, lr=1))

    def load(path):
        return af.load(create(), path)

    def safe(path):
        return af.import_model(nn.Linear(2, 2), path)

    def by_torch(path):
        return af.import_torch_weights(nn.Linear(2, 2), path)

    af.save(create(), tmp_path / "saved")
    af.export_model(create(), tmp_path / "exported")
    parted = parts(nn.Linear(2, 2), tmp_path / "parts", "bin")
    for name in ("a.bin", "a.pt"):
        torch.save(nn.Linear(2, 2).state_dict(), tmp_path / name)
    reads = {
        load: (r"af\.load\(state, ", ["saved"]),
        safe: (r"af\.import_model\(m", ["exported", "exported/model.safetensors"]),
        by_torch: (r"af\.import_torch_w", ["parts", parted, "a.bin", "a.pt"]),
    }
    for right, (words, names) in reads.items():
        for path in (tmp_path / name for name in names):
            right(path)
            for wrong in reads.keys() - {right}:
                with pytest.raises(CheckpointError, match=words):
                    wrong(path)
