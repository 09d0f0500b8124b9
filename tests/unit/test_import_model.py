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
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import accelfn as af
from tests.internals import placement
from tests.states import linear_state

META = torch.device("meta")


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


def same(one, two):
    return one.keys() == two.keys() and all(
        one[n].dtype == two[n].dtype and torch.equal(one[n], two[n]) for n in one
    )


def saved(model, path, **changes):
    """Write a model's state dict, each tied tensor once, with some entries changed."""
    held = {**values(model), **changes}
    held = {
        n: t.contiguous()
        for n, t in held.items()
        if n != "head.weight" and t is not None
    }
    safetensors.torch.save_file(held, path)
    return path


def sharded(model, folder):
    """Write a model's state dict as two files and their index."""
    held = {n: t for n, t in values(model).items() if n != "head.weight"}
    names = sorted(held)
    parts = {"model-00001-of-00002": names[::2], "model-00002-of-00002": names[1::2]}
    folder.mkdir()
    for file, some in parts.items():
        safetensors.torch.save_file(
            {n: held[n] for n in some}, folder / f"{file}.safetensors"
        )
    places = {n: f"{f}.safetensors" for f, some in parts.items() for n in some}
    index = folder / "model.safetensors.index.json"
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
            return model, sharded(model, tmp_path / "model")
    sharded(model, tmp_path / "model")
    return model, str(tmp_path / "model")


@pytest.mark.parametrize("meta", [False, True])
def test_every_kind_of_source_is_read(source, meta):
    """A file, a folder, an index, and links to them give every tensor and tie."""
    expected, where = source
    with torch.device("meta" if meta else "cpu"):
        model = Net()
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


@pytest.mark.parametrize("meta", [False, True])
def test_what_was_read_does_not_depend_on_the_file(meta, tmp_path):
    """The file may be overwritten and removed: the model's tensors are its own."""
    for number, read in enumerate((af.import_model, af.import_torch_weights)):
        path = tmp_path / ("a.pt" if number else "a.safetensors")
        torch.save(values(Net()), path) if number else saved(Net(), path)
        with torch.device("meta" if meta else "cpu"):
            model = Net()
        read(model, path)
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
            with torch.device(device):
                model = Net()
            af.import_model(model, tmp_path / "a.safetensors")
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
    with pytest.raises(af.errors.CheckpointError, match=expected):
        af.import_model(model, tmp_path / "a.safetensors")
    assert same(before, values(model))
    with pytest.warns(UserWarning, match=expected):
        af.import_model(model, tmp_path / "a.safetensors", strict=False)
    assert torch.equal(one, model.head.weight)


def test_parameters_that_share_memory_are_one(tmp_path):
    """What Accelerate stores once, because two parameters have one memory, is read so."""
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model[1].weight = nn.Parameter(model[0].weight.data)
    held = {"0.weight": torch.ones(2, 2)}
    safetensors.torch.save_file(held, tmp_path / "a.safetensors")
    af.import_model(model, tmp_path / "a.safetensors")
    assert torch.equal(torch.ones(2, 2), model[1].weight)
    af.import_model(model, tmp_path / "a.safetensors", dtype=torch.float64)
    assert model[0].weight.data_ptr() == model[1].weight.data_ptr()
    assert model[1].weight.dtype is torch.float64


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


@pytest.mark.parametrize("meta", [False, True])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float64])
def test_a_dtype_is_for_floating_point(meta, dtype, tmp_path):
    """Weights get the dtype asked for, by default the model's; integers stay."""
    half = saved(Net().half(), tmp_path / "a.safetensors")
    expected = safetensors.torch.load_file(half)
    with torch.device("meta" if meta else "cpu"):
        model = Net()
    af.import_model(model, half, dtype=dtype)
    for name, tensor in expected.items():
        integer = not tensor.is_floating_point()
        as_asked = tensor if integer else tensor.to(dtype or torch.float32)
        found = model.state_dict()[name]
        assert found.dtype is as_asked.dtype
        assert torch.equal(as_asked, found)


@pytest.mark.parametrize(
    ("name", "device"),
    [
        ("head.weight", "cuda:0"),
        ("norm.weight", "cuda:1"),
        ("norm.bias", "cuda:2"),
        ("normal.weight", "cuda:0"),
    ],
)
def test_the_longest_prefix_says_the_device(name, device):
    """A whole part of a name counts, and the longest of those that do."""
    devices = {"": "cuda:0", "norm": "cuda:1", "norm.bias": torch.device("cuda:2")}
    model = nn.ModuleDict({"normal": nn.Linear(1, 1), "norm": nn.BatchNorm1d(1)})
    found = placement("af.import_model", model, devices, None)
    assert found.device(name, torch.empty(1)) == torch.device(device)


@pytest.mark.parametrize(
    ("own", "device"), [("cpu", "cpu"), ("cuda:1", "cuda:1"), ("meta", "cpu")]
)
def test_what_no_prefix_names_stays(own, device):
    """It is filled where it is, or comes from meta to the CPU."""
    model = nn.Linear(1, 1)
    found = placement("af.import_model", model, {"bias": "cuda:0"}, None)
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
    found = {
        name: tensor.device.type
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]
    }
    on_cpu = {"1.1.bias", "1.1.angles"}
    assert on_cpu == {name for name, device in found.items() if device == "cpu"}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"device_map": "auto"}, "expected a dict from module names to devices"),
        ({"device_map": {"": "disk"}}, "device_map={'': 'disk'}"),
        ({"device_map": {"": "meta"}}, "meta tensors have no values"),
        ({"device_map": {"hed": "cpu"}}, "no module of this name.*embed, norm, head"),
        ({"device_map": {"nor": "cpu"}}, "no module of this name.*embed, norm, head"),
        ({"dtype": torch.int64}, "expected a floating-point dtype"),
        ({"dtype": "bfloat16"}, "expected a floating-point dtype"),
    ],
)
def test_options_without_meaning_are_refused(options, expected, tmp_path):
    """The error names the function, the option and what it was given."""
    for read in (af.import_model, af.import_torch_weights):
        with pytest.raises(af.errors.ArgumentError, match=expected) as error:
            read(Net(), tmp_path / "not there", **options)
        assert f"af.{read.__name__}(" in str(error.value)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"norm.bias": None}, "missing norm.bias"),
        ({"extra": torch.ones(1)}, "unexpected extra"),
        (
            {"head.bias": None, "haed.bias": torch.ones(5)},
            r"missing head.bias \(similar: haed.bias\)",
        ),
        ({"norm.bias": torch.ones(4)}, r"saved as \(4,\).*expected \(3,\)"),
        ({"norm.num_batches_tracked": torch.tensor(1.0)}, "float32, expected .*int64"),
        (
            {"norm.num_batches_tracked": torch.tensor(1, dtype=torch.int32)},
            "int32, expected .*int64",
        ),
        ({"norm.bias": torch.ones(3, dtype=torch.int64)}, "int64, expected .*float32"),
    ],
)
@pytest.mark.parametrize("meta", [False, True])
def test_what_does_not_fit_is_refused_whole(changes, expected, meta, tmp_path):
    """Names, shapes and kinds are compared before the first tensor is touched."""
    path = saved(Net(), tmp_path / "a.safetensors", **changes)
    with torch.device("meta" if meta else "cpu"):
        model = Net()
    before = {
        n: (t, t if meta else t.detach().clone()) for n, t in model.named_parameters()
    }
    with pytest.raises(af.errors.CheckpointError, match=expected) as error:
        af.import_model(model, path)
    assert "differ from the model's" in str(error.value)
    for name, (tensor, copy) in before.items():
        now = model.get_parameter(name)
        assert now is tensor
        assert meta or torch.equal(now, copy)


def test_a_loose_import_says_what_is_left(tmp_path):
    """strict=False warns of both kinds of names, takes the rest, and refuses shapes still."""
    changes = {"norm.bias": None, "extra": torch.ones(1)}
    path = saved(Net(), tmp_path / "a.safetensors", **changes)
    model = Net()
    model.norm.bias.data += 7
    with pytest.warns(UserWarning, match="differ from the model's") as warned:
        af.import_model(model, path, strict=False)
    (warning,) = warned
    assert "missing norm.bias" in str(warning.message)
    assert "unexpected extra" in str(warning.message)
    assert Path(warning.filename) == Path(__file__)
    assert torch.equal(torch.full((3,), 7.0), model.norm.bias)
    held = safetensors.torch.load_file(path)
    assert torch.equal(held["embed.weight"], model.embed.weight)
    path = saved(Net(), tmp_path / "b.safetensors", **{"norm.bias": torch.ones(4)})
    with pytest.raises(af.errors.CheckpointError, match="norm.bias saved as"):
        af.import_model(model, path, strict=False)


def test_a_buffer_that_no_file_has_is_refused_on_meta(tmp_path):
    """It is named with the remedy, before anything is read; the remedy helps."""
    path = saved(Rotary(), tmp_path / "a.safetensors")
    with META:
        model = nn.Sequential(Rotary())[0]
    with pytest.raises(
        af.errors.ModelError,
        match=r"angles: on the meta device.*af\.import_model\(lambda: Net",
    ):
        af.import_model(model, path)
    assert model.weight.is_meta
    model.register_buffer("angles", torch.ones(2), persistent=False)
    af.import_model(model, path)
    assert not any(t.is_meta for t in [*model.parameters(), *model.buffers()])
    assert af.import_model(Rotary(), path).angles.tolist() == [1, 1]


def test_a_lazy_model_is_refused(tmp_path):
    """Its parameters have no shape to compare."""
    path = saved(nn.Linear(2, 2), tmp_path / "a.safetensors")
    with pytest.raises(af.errors.ModelError, match="weight is a lazy"):
        af.import_model(nn.LazyLinear(2), path)


def test_frozen_parameters_and_their_marks_stay(tmp_path):
    """What was said of a parameter on meta holds for the one that takes its place."""
    path = saved(nn.Linear(2, 2), tmp_path / "a.safetensors")
    with META:
        model = nn.Linear(2, 2)
    model.weight.requires_grad_(requires_grad=False)
    model.weight.group = "no decay"
    af.import_model(model, path)
    assert not model.weight.requires_grad
    assert getattr(model.weight, "group", None) == "no decay"
    assert model.bias.requires_grad


def test_modes_of_the_caller_do_not_matter(tmp_path):
    """What is imported in inference mode can be trained."""
    path = saved(nn.Linear(2, 2), tmp_path / "a.safetensors")
    with META:
        model = nn.Linear(2, 2)
    with torch.inference_mode():
        af.import_model(model, path)
    model(torch.ones(1, 2)).sum().backward()
    assert model.weight.grad is not None


def test_empty_and_scalar_tensors_are_read(tmp_path):
    """A tensor without elements, one without dims, and a file without tensors."""

    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.empty = nn.Parameter(torch.empty(0, 3))
            self.also_empty = nn.Parameter(torch.empty(2, 0))
            self.scalar = nn.Parameter(torch.tensor(2.5))

    path = saved(Odd(), tmp_path / "a.safetensors")
    with META:
        model = Odd()
    assert af.import_model(model, path).scalar.item() == 2.5
    assert (model.empty.shape, model.also_empty.shape) == ((0, 3), (2, 0))
    safetensors.torch.save_file({}, tmp_path / "none.safetensors")
    af.import_model(nn.Identity(), tmp_path / "none.safetensors")


def refused(source, kind=af.errors.CheckpointError):
    """Return why a source is refused, of which the model sees nothing."""
    model = nn.Linear(2, 2)
    before = values(model)
    with pytest.raises(kind) as error:
        af.import_model(model, source)
    assert same(before, values(model))
    return str(error.value)


def test_where_there_is_nothing_says_what_to_do(tmp_path):
    """Folders and files of other kinds are sent to the function that reads them."""
    assert "does not exist" in refused(tmp_path / "none.safetensors")
    assert "neither model.safetensors nor" in refused(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    assert "af.import_torch_weights" in refused(tmp_path)
    assert "af.import_torch_weights" in refused(tmp_path / "pytorch_model.bin")
    state = linear_state(
        2, 2, optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=1)
    )
    af.save(state, tmp_path / "checkpoint")
    assert "af.load(" in refused(tmp_path / "checkpoint")


@pytest.mark.parametrize(
    "name",
    [
        "../a.safetensors",
        "/a.safetensors",
        "b/a.safetensors",
        "a\0.safetensors",
        "C:\\a.safetensors",
        "a.bin",
        "..",
        "",
        3,
        None,
    ],
)
def test_an_index_names_files_beside_it(name, tmp_path):
    """A name that leads elsewhere, or to another format, is refused as it stands."""
    saved(nn.Linear(2, 2), tmp_path / "a.safetensors")
    folder = tmp_path / "model"
    folder.mkdir()
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"weight": name, "bias": name}}))
    text = refused(folder, af.errors.CheckpointCorruptError)
    assert "'weight' is in" in text
    assert repr(name) in text


def test_an_index_is_true(tmp_path):
    """Files that are not there, tensors that are elsewhere, and no index at all are named."""
    index = sharded(nn.Linear(2, 2), tmp_path / "model")
    said = json.loads(index.read_text())
    first, second = (
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    )
    swapped = {**said, "weight_map": {"weight": first, "bias": first}}
    index.write_text(json.dumps(swapped))
    assert "no such tensor" in refused(index, af.errors.CheckpointCorruptError)
    index.write_text(json.dumps(said))
    (tmp_path / "model" / second).unlink()
    assert f"{second} does not exist" in refused(index)
    for text in ("", "[]", "{}", '{"weight_map": []}', "\xff", "[" * 100_000):
        index.write_text(text, encoding="latin-1")
        assert str(index) in refused(index, af.errors.CheckpointCorruptError)


def test_tensors_beside_those_of_the_index_are_unexpected(tmp_path):
    """What lies in a file and not in the index is not passed over in silence."""
    index = sharded(nn.Linear(2, 2), tmp_path / "model")
    said = json.loads(index.read_text())
    file = index.parent / said["weight_map"]["bias"]
    held = {**safetensors.torch.load_file(file), "extra": torch.ones(1)}
    safetensors.torch.save_file(held, file)
    assert "unexpected extra" in refused(index)


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


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"1234567",
        struct.pack("<Q", 2**63) + b"{}",
        struct.pack("<Q", 2**40) + b"{}",
        header(b"[]"),
        header(b"{"),
        header(b"\xff\xfe"),
        header(b"[" * 100_000),
        header(b'{"weight": %s, "weight": %s}' % ((json.dumps(W).encode(),) * 2)),
        header({"weight": W, "bias": B}, b"\0" * 23),
        header({"weight": W, "bias": B}, b"\0" * 25),
        header({"weight": W, "bias": {**B, "data_offsets": [8, 16]}}),
        header({"weight": W, "bias": {**B, "data_offsets": [17, 25]}}, b"\0" * 25),
        header(
            {
                n: {**e, "data_offsets": [at + 8 for at in e["data_offsets"]]}
                for n, e in (("weight", W), ("bias", B))
            },
            b"\0" * 32,
        ),
        header({"weight": W, "bias": {**B, "data_offsets": [16, 20]}}, b"\0" * 20),
        header({"weight": W, "bias": {**B, "data_offsets": [16.0, 24.0]}}),
        header({"weight": W, "bias": {**B, "data_offsets": [16]}}),
        header({"weight": W, "bias": {**B, "shape": [3]}}),
        header({"weight": W, "bias": {**B, "shape": [-2]}}),
        header({"weight": W, "bias": {**B, "shape": "2"}}),
        header({"weight": W, "bias": {**B, "dtype": ["F32"]}}),
        header({"weight": W, "bias": {"dtype": "F32"}}),
        header({"weight": W, "bias": 3}),
        header({"weight": {**W, "data_offsets": [-16, 0]}, "bias": B}),
        header(
            {
                "weight": {**W, "data_offsets": [8, 24]},
                "bias": {**B, "data_offsets": [24, 32]},
            },
            b"\0" * 32,
        ),
        header({"bias": {**B, "data_offsets": [8, 16]}}, b"\0" * 16),
        pickle.dumps({"weight": 1}),
    ],
    ids=range(27),
)
def test_what_is_no_safetensors_file_is_refused(data, tmp_path):
    """Cut off, too long, overlapping, with holes, of wrong types: the file is named."""
    path = tmp_path / "a.safetensors"
    path.write_bytes(data)
    assert str(path) in refused(path, af.errors.CheckpointCorruptError)


def test_every_truncation_is_refused(tmp_path):
    """A file cut off anywhere is not read."""
    path = saved(nn.Linear(2, 2), tmp_path / "a.safetensors")
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        refused(path, af.errors.CheckpointCorruptError)


def test_a_dtype_that_torch_lacks_is_named(tmp_path):
    """A format beyond what is read here is no damage, and is called by its name."""
    odd = {"dtype": "F4", "shape": [4], "data_offsets": [16, 18]}
    path = tmp_path / "a.safetensors"
    path.write_bytes(header({"weight": W, "bias": odd}, b"\0" * 18))
    assert "'bias' has the dtype 'F4'" in refused(path)


def test_a_directory_is_no_file(tmp_path):
    """A folder with a file's name is looked into as a folder."""
    (tmp_path / "model.safetensors").mkdir()
    assert "cannot be read" in refused(tmp_path, af.errors.CheckpointCorruptError)


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


def test_what_accelerate_saves_by_torch_is_read(accelerator, tmp_path):
    """Its `pytorch_model.bin` is a state dict."""
    model = Net()
    accelerator.save_model(model, tmp_path, safe_serialization=False)
    found = af.import_torch_weights(Net(), tmp_path / "pytorch_model.bin")
    assert same(values(model), values(found))


@pytest.mark.parametrize("meta", [False, True])
@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("dtype", [None, torch.float64])
def test_what_torch_saves_is_read(meta, zipped, dtype, tmp_path):
    """A state dict, in either format of torch's, gives what its safetensors would."""
    model = Net()
    model(torch.tensor([1, 2, 3]))
    torch.save(
        model.state_dict(), tmp_path / "a.pt", _use_new_zipfile_serialization=zipped
    )
    saved(model, tmp_path / "a.safetensors")
    with torch.device("meta" if meta else "cpu"):
        one, two = Net(), Net()
    af.import_torch_weights(one, tmp_path / "a.pt", dtype=dtype)
    af.import_model(two, tmp_path / "a.safetensors", dtype=dtype)
    assert same(values(two), values(one))
    assert one.head.weight is one.embed.weight
    one(torch.tensor([1, 2])).sum().backward()


def test_torch_weights_are_compared_alike(tmp_path):
    """Names and shapes that differ are refused, or said, as by `import_model`."""
    held = {**values(nn.Linear(2, 2)), "extra": torch.ones(1)}
    torch.save(held, tmp_path / "a.pt")
    with pytest.raises(af.errors.CheckpointError, match="unexpected extra"):
        af.import_torch_weights(nn.Linear(2, 2), tmp_path / "a.pt")
    with pytest.warns(UserWarning, match="unexpected extra"):
        af.import_torch_weights(nn.Linear(2, 2), tmp_path / "a.pt", strict=False)


class Payload:
    """What runs code when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize("write", ["pickle", "torch"])
def test_code_in_a_file_is_not_run(write, tmp_path):
    """A pickle that would make a file is refused, and has made none."""
    path, made = tmp_path / "a.pt", tmp_path / "made"
    held = OrderedDict(weight=torch.ones(2, 2), bias=Payload(made))
    if write == "torch":
        torch.save(held, path)
    else:
        path.write_bytes(pickle.dumps(held, protocol=2))
    with pytest.raises(af.errors.CheckpointError, match=re.escape(str(path))):
        af.import_torch_weights(nn.Linear(2, 2), path)
    assert not made.exists()


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
    with pytest.raises(af.errors.CheckpointError, match=expected):
        af.import_torch_weights(nn.Linear(2, 2), tmp_path / "a.pt")


def test_a_file_of_torch_that_is_cut_off_is_refused(tmp_path):
    """At any length it is refused, and so is none, by name."""
    path = tmp_path / "a.pt"
    with pytest.raises(af.errors.CheckpointError, match="does not exist"):
        af.import_torch_weights(nn.Linear(2, 2), path)
    torch.save(nn.Linear(2, 2).state_dict(), path)
    whole = path.read_bytes()
    for length in range(0, len(whole), 37):
        path.write_bytes(whole[:length])
        with pytest.raises(af.errors.CheckpointError, match=re.escape(str(path))):
            af.import_torch_weights(nn.Linear(2, 2), path)


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
    with pytest.raises(af.errors.CheckpointCorruptError, match=r"b\.pt.*is compressed"):
        af.import_torch_weights(nn.Linear(1000, 1), tmp_path / "b.pt")


def test_a_tensor_is_read_where_the_index_says(tmp_path):
    """Of one that lies in two files, that of the file which the index names."""
    index = sharded(nn.Linear(2, 2), tmp_path / "model")
    places = json.loads(index.read_text())["weight_map"]
    for name, other in (("bias", places["weight"]), ("weight", places["bias"])):
        held = safetensors.torch.load_file(index.parent / other)
        true = safetensors.torch.load_file(index.parent / places[name])[name]
        held[name] = torch.full_like(true, 9.0)
        safetensors.torch.save_file(held, index.parent / other)
        model = nn.Linear(2, 2)
        af.import_model(model, index)
        assert torch.equal(getattr(model, name), true)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_tensors_without_elements_are_not_tied(device, tmp_path):
    """Several of one shape lie at one address, and each is imported under its own name."""

    def model():
        empty = {"a": torch.empty(0, 2), "b": torch.empty(0, 2), "c": torch.ones(2)}
        return nn.ParameterDict(empty)

    saved(model(), tmp_path / "model.safetensors")
    into = model().to(device)
    af.import_model(into, tmp_path)
    assert same(values(model()), values(into))
    assert into["a"] is not into["b"]
    held = {"a": torch.empty(0, 2), "c": torch.ones(2)}
    safetensors.torch.save_file(held, tmp_path / "lacking.safetensors")
    with pytest.raises(af.errors.Error, match="missing b"):
        af.import_model(model().to(device), tmp_path / "lacking.safetensors")


class Mixed(nn.Module):
    """A model of a parameter without elements between others, and a count."""

    def __init__(self, dtype):
        super().__init__()
        self.first = nn.Parameter(torch.arange(7, dtype=dtype))
        self.none = nn.Parameter(torch.empty(3, 0, dtype=dtype))
        self.last = nn.Parameter(torch.arange(5, dtype=dtype) - 3)
        self.register_buffer("count", torch.tensor(4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("beside", range(0, 64, 8))
def test_what_is_mapped_begins_where_kernels_expect_it(tmp_path, dtype, beside):
    """Wherever it lies in its file; what is written into it is not written to the file."""
    path, expected = tmp_path / "a.safetensors", Mixed(dtype)
    tensors = expected.state_dict()
    safetensors.torch.save_file(tensors, path, metadata={"beside": "x" * beside})
    raw = path.read_bytes()
    model = af.import_model(lambda: Mixed(dtype), path, mapped=True)
    assert same(values(expected), values(model))
    for param in model.parameters():
        assert param.data_ptr() % 64 == 0
        with torch.no_grad():
            param.add_(1)
    assert torch.equal(model.first, expected.first + 1)
    assert path.read_bytes() == raw
