# SPDX-License-Identifier: Apache-2.0
"""Imports into models without memory, and of the files that torch.save wrote in parts."""

import json
import threading

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import accelfn as af
from tests.real_models import DECODER
from tests.states import linear_state


class Rotary(nn.Module):
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


def whole(model):
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def same(one, two):
    return one.keys() == two.keys() and all(torch.equal(one[n], two[n]) for n in one)


def written(model, path):
    """Write a state dict, each tensor once."""
    held, seen = {}, set()
    for name, tensor in model.state_dict().items():
        if tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            held[name] = tensor.clone()
    safetensors.torch.save_file(held, path)
    return path


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
        return Rotary(width, base, tied=tied, once=once)

    model, folder = make(), tmp_path_factory.mktemp("a")
    if by_torch:
        torch.save(model.state_dict(), folder / "a.bin")
        found = af.import_torch_weights(make, folder / "a.bin")
    else:
        found = af.import_model(make, written(model, folder / "a.safetensors"))
    assert same(whole(model), whole(found))
    assert (found.first is found.second) == (tied or once)
    x = torch.randn(2, width)
    assert torch.equal(model(x), found(x))
    assert not any(each.is_meta for each in whole(found).values())


def test_a_factory_s_parameters_have_no_memory(tmp_path):
    """Only parameters are without, only those of the factory, and only while it runs."""
    seen = {}

    def elsewhere():
        seen["thread"] = nn.Linear(1, 1).weight.device.type

    def make():
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        model = Rotary(3)
        seen.update({name: each.device.type for name, each in whole(model).items()})
        return model

    af.import_model(make, written(Rotary(3), tmp_path / "a.safetensors"))
    meta = {name for name, device in seen.items() if device == "meta"}
    assert meta == {"first", "second"}
    assert not nn.Linear(1, 1).weight.is_meta

    def failing():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        af.import_model(failing, tmp_path / "a.safetensors")
    assert not nn.Linear(1, 1).weight.is_meta


@pytest.mark.parametrize("read", [af.import_model, af.import_torch_weights])
def test_what_makes_no_model_is_refused(read, tmp_path):
    """Section C: junk in the place of a model is named, and so is a factory of another."""
    for value in (None, 3, "net", {}):
        with pytest.raises(
            af.errors.ModelError, match="expected a torch.nn.Module, or a func"
        ):
            read(value, tmp_path)
    with pytest.raises(
        af.errors.ModelError, match=r"without arguments.*functools.partial\(Linear"
    ):
        read(nn.Linear, tmp_path)
    with pytest.raises(af.errors.ModelError, match="it returned int"):
        read(lambda: 3, tmp_path)


KINDS = {"Llama": {}, "Mistral": {}, "Qwen2": {}, "Phi": {}, "Gemma": {"head_dim": 4}}


def tiny(name):
    """Return what makes a small model of Transformers."""
    import transformers

    config = getattr(transformers, f"{name}Config")(**DECODER, **KINDS[name])
    kind = getattr(transformers, f"{name}ForCausalLM")
    return lambda: kind(config)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("way", ["factory", "meta", "part of another"])
def test_a_rotary_model_on_meta_is_the_real_one(name, way, tmp_path):
    """Section D: the logits of what import_model made without memory are the real model's."""
    make = tiny(name)
    torch.manual_seed(1)
    model = make().eval()
    if way == "factory":
        model.save_pretrained(tmp_path)
        found = af.import_model(make, tmp_path)
    elif way == "meta":
        model.save_pretrained(tmp_path)
        with torch.device("meta"):
            empty = make()
        found = af.import_model(empty, tmp_path)
    else:
        written(nn.ModuleDict({"net": model}), tmp_path / "model.safetensors")
        with torch.device("meta"):
            empty = nn.ModuleDict({"net": make()})
        found = af.import_model(empty, tmp_path)["net"]
    ids = torch.arange(10).reshape(2, 5)
    assert torch.equal(model(ids).logits, found.eval()(ids).logits)
    assert same(whole(model), whole(found))


def parts(model, folder):
    """Write a state dict as torch.save does in two parts, with their index."""
    folder.mkdir()
    held = model.state_dict()
    files = [f"pytorch_model-0000{i}-of-00002.bin" for i in (1, 2)]
    places = {name: files[i % 2] for i, name in enumerate(held)}
    for file in files:
        own = {n: t.clone() for n, t in held.items() if places[n] == file}
        torch.save(own, folder / file)
    index = folder / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return index


@pytest.mark.parametrize("meta", [False, True])
@pytest.mark.parametrize("given_as", ["folder", "index", "one file"])
def test_parts_that_torch_saved_are_read(meta, given_as, tmp_path):
    """F64: a folder of .bin files, or their index, gives what one file does."""
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    index = parts(model, tmp_path / "model")
    source = index if given_as == "index" else index.parent
    if given_as == "one file":
        index.unlink()
        torch.save(model.state_dict(), index.parent / "pytorch_model.bin")
    with torch.device("meta" if meta else "cpu"):
        found = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    af.import_torch_weights(found, source)
    assert same(model.state_dict(), found.state_dict())


def test_of_a_name_in_two_files_the_index_says_which(tmp_path):
    """Files of a larger save before may have the others' tensors, too."""
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    index = parts(model, tmp_path / "model")
    held = model.state_dict()
    for file in index.parent.glob("*.bin"):
        own = torch.load(file, weights_only=True)
        stale = {name: each + 1 for name, each in held.items() if name not in own}
        torch.save({**own, **stale}, file)
    found = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    af.import_torch_weights(found, index)
    assert same(held, found.state_dict())


class Payload:
    """What runs code when it is unpickled."""

    def __reduce__(self):
        return print, ("it ran",)


def test_parts_run_no_code(tmp_path, capsys):
    """F64: every part is read with weights_only=True."""
    index = parts(nn.Linear(2, 2), tmp_path / "model")
    (part,) = index.parent.glob("*00002-of*")
    torch.save({"bias": Payload()}, part)
    with pytest.raises(af.errors.CheckpointError, match="contains more than tensors"):
        af.import_torch_weights(nn.Linear(2, 2), index)
    assert "it ran" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda places: {**places, "bias": "../a.bin"}, "not the name of a .bin"),
        (lambda places: {**places, "bias": "a.safetensors"}, "not the name of a .bin"),
        (lambda places: {**places, "bias": "a.bin"}, "a.bin does not exist"),
        (lambda places: {**places, "bias": places["weight"]}, "has no such tensor"),
        (lambda places: {**places, "more": places["bias"]}, "has no such tensor"),
        (lambda _: [], "is not an index"),
    ],
)
def test_an_index_of_parts_is_true(change, expected, tmp_path):
    """What an index of .bin files names is beside it, and has the tensors that it says."""
    index = parts(nn.Linear(2, 2), tmp_path / "model")
    places = json.loads(index.read_text())["weight_map"]
    index.write_text(json.dumps({"weight_map": change(places)}))
    with pytest.raises(af.errors.CheckpointError, match=expected):
        af.import_torch_weights(nn.Linear(2, 2), index.parent)


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
    single = tmp_path / "exported/model.safetensors"
    parted = parts(nn.Linear(2, 2), tmp_path / "parts")
    for name in ("a.bin", "a.pt"):
        torch.save(nn.Linear(2, 2).state_dict(), tmp_path / name)
    reader = {
        tmp_path / "saved": load,
        tmp_path / "exported": safe,
        single: safe,
        parted.parent: by_torch,
        parted: by_torch,
        tmp_path / "a.bin": by_torch,
        tmp_path / "a.pt": by_torch,
    }
    named = {
        load: r"af\.load\(state, ",
        safe: r"af\.import_model\(model, ",
        by_torch: r"af\.import_torch_weights\(model, ",
    }
    for path, right in reader.items():
        right(path)
        for wrong in named.keys() - {right}:
            with pytest.raises(af.errors.CheckpointError, match=named[right]):
                wrong(path)


def test_what_is_frozen_stays_frozen(tmp_path):
    """A parameter that the factory makes without a gradient has none in the model."""

    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.fixed = nn.Parameter(torch.ones(2), requires_grad=False)
            self.free = nn.Parameter(torch.ones(2))
            self.held = nn.Linear(2, 2)
            self.held.requires_grad_(requires_grad=False)

    path = written(Half(), tmp_path / "model.safetensors")
    model = af.import_model(Half, path)
    trained = {name: each.requires_grad for name, each in model.named_parameters()}
    assert trained == {
        "fixed": False,
        "free": True,
        "held.weight": False,
        "held.bias": False,
    }
