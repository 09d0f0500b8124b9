# SPDX-License-Identifier: Apache-2.0
"""`export_model`, `full_params` and `save_pretrained`: whole, agreed, and read by others."""

import errno
import json
import os
from functools import partial

import attrs
import pytest
import safetensors.torch
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

import accelfn as af
from accelfn.testing import simulate

SGD = partial(torch.optim.SGD, lr=0.1)


class Three(nn.Module):
    """Three matrices of 4,096 bytes."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def fresh(model=Three, **options):
    return af.TrainState.create(model=model, optimizer=SGD, **options)


def files_in(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(
    ("size", "count"),
    [
        (1, 3),
        (8191, 3),
        (8192, 2),
        (12288, 1),
        ("8191B", 3),
        ("8 KB", 3),
        ("8KiB", 2),
        ("12.288KB", 1),
        ("1MB", 1),
        ("1GiB", 1),
        ("5TB", 1),
    ],
)
def test_a_size_is_bytes_or_text(size, count, tmp_path):
    """A file is filled up to the size, in units of 1,000 or 1,024."""
    af.export_model(fresh(), tmp_path / "model", max_shard_size=size)
    assert count == len([n for n in files_in(tmp_path / "model") if "index" not in n])


@pytest.mark.parametrize(
    "size", [0, -1, True, 1.5, None, "", "5", "5gb", "5 gigs", "-1GB", "0KB", "0.1B"]
)
def test_what_is_no_size_is_refused(size, tmp_path):
    """The error shows what was given and what is expected, and nothing is written."""
    with pytest.raises(af.errors.ArgumentError, match='such as "5GB" or "100MiB"'):
        af.export_model(fresh(), tmp_path / "model", max_shard_size=size)
    assert files_in(tmp_path) == []


def test_a_larger_tensor_has_a_file_of_its_own(tmp_path):
    """Those that are smaller still go together, as Hugging Face's tools divide them."""

    def model():
        return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 40), nn.Linear(40, 1))

    af.export_model(fresh(model), tmp_path / "model", max_shard_size="200B")
    index = json.loads((tmp_path / "model/model.safetensors.index.json").read_text())
    first, second, third = (f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3))
    assert index["weight_map"]["1.weight"] == first
    assert index["weight_map"]["0.weight"] == index["weight_map"]["0.bias"] == second
    assert index["weight_map"]["1.bias"] == second
    assert index["weight_map"]["2.weight"] == index["weight_map"]["2.bias"] == third


def test_safetensors_reads_it(tmp_path):
    """Its own loader gives the state dict, strictly, with ties and persistent buffers."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(5, 3)
            self.norm = nn.BatchNorm1d(3)
            self.head = nn.Linear(3, 5)
            self.head.weight = self.embed.weight
            self.register_buffer("mask", torch.ones(2), persistent=False)

    state = fresh(Net)
    af.export_model(state, tmp_path / "model")
    path = tmp_path / "model/model.safetensors"
    held = safetensors.torch.load_file(path)
    assert sorted(held) == sorted({*Net().state_dict()} - {"head.weight"})
    model = Net()
    safetensors.torch.load_model(model, path)
    assert torch.equal(model.head.weight, state.params["embed.weight"])
    assert torch.equal(model.norm.running_var, state.buffers["norm.running_var"])


def test_exports_are_alike(tmp_path):
    """Exporting twice writes the same bytes."""
    state = fresh()
    for name in ("one", "two"):
        af.export_model(state, tmp_path / name, max_shard_size=8192)
    one, two = (
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()}
        for name in ("one", "two")
    )
    assert one == two


@pytest.mark.parametrize("export", [af.export_model, af.save_pretrained])
def test_what_is_there_is_left_alone(export, tmp_path):
    """A directory that exists is refused, with another name, on every rank."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model/mine").touch()

    def on_rank(world):
        with pytest.raises(af.errors.CheckpointError, match=r"already exists.*model-2"):
            export(fresh(Stub, world=world), tmp_path / "model")

    simulate(2, on_rank)
    assert (files_in(tmp_path), files_in(tmp_path / "model")) == (["model"], ["mine"])


@pytest.mark.parametrize("at", range(5))
def test_a_full_disk_leaves_nothing(at, tmp_path, monkeypatch):
    """Wherever the flush fails, all ranks say so, and the next export finds a clean place."""
    flush, count = os.fsync, iter(range(100))

    def full(handle):
        if next(count) == at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        flush(handle)

    def on_rank(world):
        with pytest.raises(
            af.errors.CheckpointWriteError, match="rank 0 could not"
        ) as error:
            af.export_model(fresh(world=world), tmp_path / "model", max_shard_size=4096)
        return str(error.value)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        texts = simulate(2, on_rank)
    assert len(set(texts)) == 1
    assert "No space left" in texts[0]
    if at < 3:
        assert "needs 4,096 bytes" in texts[0]
    assert files_in(tmp_path) == []
    af.export_model(fresh(), tmp_path / "model")


def test_what_safetensors_cannot_hold_is_named(tmp_path):
    """A dtype that it lacks, and what a module adds to its state dict, are refused."""

    class Complex(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(2, dtype=torch.complex128))

    class Extra(nn.Linear):
        def get_extra_state(self):
            return {"version": 3}

        def set_extra_state(self, state): ...

    with pytest.raises(af.errors.CheckpointError, match="w has dtype torch.complex128"):
        af.export_model(fresh(Complex), tmp_path / "model")
    with pytest.raises(
        af.errors.CheckpointError, match=r"0\._extra_state .* is a dict"
    ):
        af.export_model(fresh(lambda: nn.Sequential(Extra(1, 1))), tmp_path / "model")
    assert files_in(tmp_path) == []


def test_layouts_do_not_matter(tmp_path):
    """Transposed and expanded parameters are exported by their values."""
    wide = torch.arange(6.0).reshape(2, 3)

    class Views(nn.Module):
        def __init__(self):
            super().__init__()
            self.transposed = nn.Parameter(wide.clone().t())
            self.strided = nn.Parameter(wide[:, ::2])

    af.export_model(fresh(Views), tmp_path / "model")
    held = safetensors.torch.load_file(tmp_path / "model/model.safetensors")
    assert torch.equal(wide.t(), held["transposed"])
    assert torch.equal(wide[:, ::2], held["strided"])


@pytest.mark.parametrize("act", [af.export_model, af.save_pretrained, af.full_params])
def test_a_donated_state_is_refused(act, tmp_path):
    """Its tensors are another's."""
    state = fresh(Stub)
    af.make_step(lambda model, x: model(x).sum())(state, torch.ones(1, 1))
    args = () if act is af.full_params else (tmp_path / "model",)
    with pytest.raises(af.errors.StateDonatedError):
        act(state, *args)


class Stub(nn.Linear):
    """A model that writes itself, in two files."""

    fails = False

    def __init__(self):
        super().__init__(1, 1)

    def save_pretrained(self, directory, *, note=""):
        (directory / "config.json").write_text(note)
        if self.fails:
            msg = "no such template"
            raise KeyError(msg)
        safetensors.torch.save_file(self.state_dict(), directory / "model.safetensors")


def test_a_model_writes_itself_once(tmp_path):
    """Rank 0 calls its method, with the options, on what is evaluated; the others wait."""

    def on_rank(world):
        state = fresh(Stub, world=world, setup=af.ema(0.5))
        for param in state.params.values():
            param.add_(1)
        af.save_pretrained(state, tmp_path / "model", note="hello", at="eval")
        af.save_pretrained(state, tmp_path / "raw", at="train")
        assert (tmp_path / "model/config.json").read_text() == "hello"
        for name, expected in (("model", state.slots["ema"]), ("raw", state.params)):
            held = safetensors.torch.load_file(tmp_path / name / "model.safetensors")
            assert all(torch.equal(expected[n], held[n]) for n in expected)

    simulate(2, on_rank)
    assert files_in(tmp_path) == ["model", "raw"]


def test_a_method_that_fails_fails_on_all_ranks(tmp_path, monkeypatch):
    """Whatever it raises is told to all, and nothing is left."""
    monkeypatch.setattr(Stub, "fails", True)

    def on_rank(world):
        expected = r"rank 0 could not write by .*KeyError.*no such template"
        with pytest.raises(af.errors.CheckpointWriteError, match=expected):
            af.save_pretrained(fresh(Stub, world=world), tmp_path / "model")

    simulate(2, on_rank)
    assert files_in(tmp_path) == []


def test_what_cannot_write_itself_is_refused(tmp_path):
    """A model without the method is sent to export_model, an upload is not begun."""
    with pytest.raises(
        af.errors.ModelError, match="Three, has no save_pretrained. Use af.exp"
    ):
        af.save_pretrained(fresh(), tmp_path / "model")
    with pytest.raises(af.errors.ArgumentError, match="Upload it after"):
        af.save_pretrained(fresh(Stub), tmp_path / "model", push_to_hub=True)
    assert files_in(tmp_path) == []


@pytest.fixture
def _group():
    """A default process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_group")
def test_sharded_parameters_are_whole_for_others(tmp_path):
    """A DTensor is gathered, for full_params and for export."""
    mesh = dist.init_device_mesh("cpu", (1,))
    whole = fresh(Stub)
    sharded = attrs.evolve(
        whole,
        params={
            n: distribute_tensor(p, mesh, [Shard(0)]) for n, p in whole.params.items()
        },
    )
    found = af.full_params(sharded)
    af.export_model(sharded, tmp_path / "model")
    held = safetensors.torch.load_file(tmp_path / "model/model.safetensors")
    af.save_pretrained(sharded, tmp_path / "own")
    own = safetensors.torch.load_file(tmp_path / "own/model.safetensors")
    for name, param in whole.params.items():
        for each in (found, held, own):
            assert type(each[name]) is torch.Tensor
            assert torch.equal(param, each[name])


@pytest.fixture
def gpt(monkeypatch):
    """A state of a tiny language model with tied embeddings, an update old, and tokens."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 10, "n_positions": 10}
    config = GPT2Config(**sizes, vocab_size=10, bos_token_id=0, eos_token_id=0)
    tokens = torch.arange(20).reshape(2, 10) % 10

    def loss(model, batch):
        return nn.functional.cross_entropy(
            model(input_ids=batch).logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten()
        )

    state = fresh(lambda: GPT2LMHeadModel(config), setup=af.ema(0.5))
    state, _ = af.make_step(loss)(state, tokens)
    return state, tokens, config


@pytest.mark.parametrize("size", ["5GB", "2KB"])
def test_transformers_reads_an_export(size, gpt, tmp_path):
    """`from_pretrained` finds every name, ties them, and computes the same."""
    from transformers import GPT2LMHeadModel

    state, tokens, config = gpt
    af.export_model(state, tmp_path / "model", max_shard_size=size, at="eval")
    config.save_pretrained(tmp_path / "model")
    model, told = GPT2LMHeadModel.from_pretrained(
        tmp_path / "model", output_loading_info=True, local_files_only=True
    )
    assert not any(told.values()), told
    assert model.lm_head.weight is model.transformer.wte.weight
    expected = af.snapshot_model(state, at="eval")
    assert not torch.equal(
        expected(tokens).logits, af.snapshot_model(state, at="train")(tokens).logits
    )
    assert torch.equal(expected(tokens).logits, model(tokens).logits)


def test_transformers_models_write_themselves(gpt, tmp_path):
    """What `save_pretrained` wrote, by accelfn or on a lent module, is read by both."""
    from transformers import GPT2LMHeadModel

    state, tokens, config = gpt
    af.save_pretrained(state, tmp_path / "ours", max_shard_size="2KB", at="eval")
    assert "model.safetensors.index.json" in files_in(tmp_path / "ours")
    with af.borrow_model(state, at="eval") as model:
        model.save_pretrained(tmp_path / "theirs")
    expected = af.snapshot_model(state, at="eval")(tokens).logits
    for name in ("ours", "theirs"):
        read = partial(GPT2LMHeadModel.from_pretrained, local_files_only=True)
        assert torch.equal(expected, read(tmp_path / name)(tokens).logits)
        with torch.device("meta"):
            model = GPT2LMHeadModel(config).eval()
        model = af.import_model(model, tmp_path / name)
        assert model.lm_head.weight is model.transformer.wte.weight
        assert torch.equal(expected, model(tokens).logits)
