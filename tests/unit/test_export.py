# SPDX-License-Identifier: Apache-2.0
"""`export_model`, `full_params` and `save_pretrained`: whole, agreed, and read by others."""

import errno
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
from tests.checkpoints import refused

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


SIZES = {1: 3, 8191: 3, 8192: 2, 12288: 1, "8191B": 3, "8 KB": 3, "8KiB": 2}
SIZES |= {"12.288KB": 1, "1MB": 1, "1GiB": 1, "5TB": 1}
NO_SIZES = 0, -1, True, 1.5, None, "", "5", "5gb", "5 gigs", "-1GB", "0KB", "0.1B"


def test_a_size_is_bytes_or_text(tmp_path):
    """A file is filled up to the size, in units of 1,000 or 1,024."""
    state = fresh()
    for size, count in SIZES.items():
        af.export_model(state, tmp_path / str(size), max_shard_size=size)
        assert len([*(tmp_path / str(size)).glob("*.safetensors")]) == count


def test_what_is_no_size_is_refused(tmp_path):
    """The error shows what was given and what is expected, and nothing is written."""
    for size in NO_SIZES:
        with refused('such as "5GB" or "100MiB"', af.errors.ArgumentError):
            af.export_model(fresh(), tmp_path / "model", max_shard_size=size)
    assert files_in(tmp_path) == []


def test_safetensors_reads_it(tmp_path):
    """Its own loader gives the state dict, strictly, with ties; exports are alike."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(5, 3), nn.Linear(3, 5)
            self.norm = nn.BatchNorm1d(3)
            self.head.weight = self.embed.weight
            self.register_buffer("mask", torch.ones(2), persistent=False)

    state, model = fresh(Net), Net()
    path = tmp_path / "model/model.safetensors"
    af.export_model(state, path.parent)
    names = {*model.state_dict()} - {"head.weight"}
    assert safetensors.torch.load_file(path).keys() == names
    safetensors.torch.load_model(model, path)
    assert torch.equal(model.head.weight, state.params["embed.weight"])
    assert torch.equal(model.norm.running_var, state.buffers["norm.running_var"])
    af.export_model(state, tmp_path / "again")
    assert (tmp_path / "again/model.safetensors").read_bytes() == path.read_bytes()


@pytest.mark.parametrize("export", [af.export_model, af.save_pretrained])
def test_what_is_there_is_left_alone(export, tmp_path):
    """A directory that exists is refused, with another name, on every rank."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model/mine").touch()

    def on_rank(world):
        with refused("already exists.*model-2"):
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
        with refused("rank 0 could not", af.errors.CheckpointWriteError) as error:
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

    with refused("w has dtype torch.complex128"):
        af.export_model(fresh(Complex), tmp_path / "model")
    with refused(r"0\._extra_state .* is a dict"):
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
            raise KeyError("no such template")
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
        words = r"rank 0 could not write by .*KeyError.*no such template"
        with refused(words, af.errors.CheckpointWriteError):
            af.save_pretrained(fresh(Stub, world=world), tmp_path / "model")

    simulate(2, on_rank)
    assert files_in(tmp_path) == []


def test_what_cannot_write_itself_is_refused(tmp_path):
    """A model without the method is sent to export_model, an upload is not begun."""
    with refused("Three, has no save_pretrained. Use af.exp", af.errors.ModelError):
        af.save_pretrained(fresh(), tmp_path / "model")
    with refused("Upload it after", af.errors.ArgumentError):
        af.save_pretrained(fresh(Stub), tmp_path / "model", push_to_hub=True)
    assert files_in(tmp_path) == []


def test_sharded_parameters_are_whole_for_others(tmp_path):
    """A DTensor is gathered, for full_params and for export."""

    def exported():
        mesh, whole = dist.init_device_mesh("cpu", (1,)), fresh(Stub)
        params = {
            n: distribute_tensor(p, mesh, [Shard(0)]) for n, p in whole.params.items()
        }
        sharded = attrs.evolve(whole, params=params)
        af.export_model(sharded, tmp_path / "model")
        af.save_pretrained(sharded, tmp_path / "own")
        return whole.params, af.full_params(sharded)

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        params, found = exported()
    finally:
        dist.destroy_process_group()
    load = safetensors.torch.load_file
    files = [load(tmp_path / name / "model.safetensors") for name in ("model", "own")]
    for name, param in params.items():
        for each in (found, *files):
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
    train, expected = (
        af.snapshot_model(state, at=at)(tokens).logits for at in ("train", "eval")
    )
    assert not torch.equal(expected, train)
    assert torch.equal(expected, model(tokens).logits)


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
