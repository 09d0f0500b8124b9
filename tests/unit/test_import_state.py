# SPDX-License-Identifier: Apache-2.0
"""`import_state`: what is refused, and in which words; what is told of what it did."""

import pickle
import re
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

import accelfn as af
from accelfn.errors import CheckpointError
from accelfn.testing import simulate
from tests.checkpoints import Bomb
from tests.states import linear_state, values
from tests.zero_folders import Training, write_zero

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
ADAMW = partial(torch.optim.AdamW, lr=0.1)


class Net(nn.Module):
    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(2, width)
        self.norm = nn.BatchNorm1d(width)


def trained(make=ADAMW, net=Net):
    """Return a module and its optimizer after an update."""
    model = net()
    optimizer = make(model.parameters())
    batch = torch.ones(4, 2) * torch.arange(4.0)[:, None]
    model.norm(model.first(batch)).sum().backward()
    optimizer.step()
    return model, optimizer


def saved(folder, **beside):
    """Write a distributed checkpoint."""
    model, optimizer = trained()
    weights, kept = get_state_dict(model, optimizer)
    held = {"model": weights, "optim": kept, **beside}
    dcp.save(held, checkpoint_id=folder / "dcp", no_dist=True)
    return model, folder / "dcp"


def edited(folder, change):
    """Write a distributed checkpoint, and change its records."""
    _, folder = saved(folder)
    records = pickle.loads((folder / ".metadata").read_bytes())  # noqa: S301 - our own
    change(records)
    (folder / ".metadata").write_bytes(pickle.dumps(records))
    return folder


def create(make=ADAMW, net=Net, **options):
    return af.TrainState.create(model=net, optimizer=make, **options)


def accelerate(folder, model, optimizer, change=dict):
    """Write what `save_state` writes of both, with a change of what the optimizer's says."""
    held = optimizer.state_dict()
    change(held)
    save_file(model.state_dict(), folder / "model.safetensors")
    torch.save(held, folder / "optimizer.bin")
    return model


def refused(folder, state=None, **options):
    """Return why an import is refused."""
    with pytest.raises(CheckpointError) as caught:
        af.import_state(state or create(), folder, **options)
    return str(caught.value)


def test_it_tells_what_it_did(tmp_path):
    """What was loaded, what is there beside it, and in which dtype it was."""
    model, folder = saved(tmp_path, epoch=3, scheduler={"last_epoch": 1})
    report = af.import_state(create(net=lambda: Net().double()), folder)
    assert set(report.loaded) > {"params.first.weight", "buffers.norm.running_mean"}
    assert {"epoch", "scheduler.last_epoch"} < set(report.unexpected)
    assert report.missing == ()
    assert report.cast["params.first.weight"] == "torch.float32 to torch.float64"
    assert torch.equal(report.state.params["first.weight"], model.first.weight.double())
    assert "loaded" in str(report)
    assert report.state.opt_state["first.weight"]["exp_avg"].dtype is torch.float64


def test_slots_begin_with_what_was_imported(tmp_path):
    """An average is that of the weights that were imported; the user's own entries stay."""
    model, folder = saved(tmp_path)
    state = create(setup=af.ema(0.5)).with_slot("mine", {"n": 3})
    found = af.import_state(state, folder).state
    assert torch.equal(found.slots["ema"]["first.weight"], model.first.weight)
    assert found.slots["mine"] == {"n": 3}
    assert (found.step, state.step) == (1, 0)
    assert not torch.equal(state.params["first.weight"], model.first.weight)


def test_a_directory_of_sharded_folders_is_accelerate_s(tmp_path):
    """What Accelerate has FSDP save is in two folders, of a model and an optimizer."""
    model, optimizer = trained()
    weights, kept = get_state_dict(model, optimizer)
    save = partial(dcp.save, no_dist=True)
    save({"model": weights}, checkpoint_id=tmp_path / "pytorch_model_fsdp_0")
    save({"optimizer": kept}, checkpoint_id=tmp_path / "optimizer_0")
    report = af.import_state(create(), tmp_path)
    assert report.missing == ()
    assert torch.equal(report.state.params["first.weight"], model.first.weight)
    assert report.state.step == 1


@pytest.mark.parametrize(
    ("step", "found"),
    [
        (torch.tensor(7), 7),
        (torch.tensor(7, dtype=torch.uint8), 7),
        (torch.tensor(7.0), 1),  # as the optimizer counts
        (torch.tensor([7]), 1),
    ],
)
def test_a_count_of_updates_is_a_whole_number(tmp_path, step, found):
    """A tensor of one, beside the model, says how many there were; any other is left."""
    _, folder = saved(tmp_path, step=step)
    report = af.import_state(create(), folder)
    assert report.state.step == found
    assert ("step" in report.unexpected) == (found != 7)


def named(*names):
    """Return a change that names the parameters of an optimizer's one group."""
    return lambda held: held["param_groups"][0].update(param_names=[*names])


NAMES = ("first.weight", "first.bias", "norm.weight", "norm.bias")


IS_NONE = "is not the state_dict() of an optimizer"
WRONG = [
    (named(*NAMES[:3]), "groups of sizes [4], but [3] parameter names"),
    (named(*NAMES, "more"), "groups of sizes [4], but [5] parameter names"),
    (named(*NAMES[:3], "other"), "parameters that this model lacks: other."),
    (lambda held: held["param_groups"][0]["params"].pop(), "of sizes [3], but"),
    (lambda held: held.pop("state"), IS_NONE),
    (lambda held: held.update(param_groups=3), IS_NONE),
    (lambda held: held.update(state=3), IS_NONE),
    (lambda held: held["state"].update({1: 3}), IS_NONE),
]


@pytest.mark.parametrize(("change", "said"), WRONG)
def test_an_optimizer_of_positions_that_do_not_fit_is_refused(tmp_path, change, said):
    """Names or parameters too few or too many, and what is no optimizer's: the file is named."""
    accelerate(tmp_path, *trained(), change)
    text = refused(tmp_path)
    assert said in text
    assert str(tmp_path) in text


def test_weights_of_no_parameter_are_told_and_left(tmp_path):
    """Of what Accelerate wrote of a larger model, a loose import takes what the state has."""
    model = accelerate(tmp_path, *trained())
    held = {**model.state_dict(), "head.weight": torch.ones(9)}
    save_file(held, tmp_path / "model.safetensors")
    assert "unexpected head.weight" in refused(tmp_path)
    with pytest.warns(UserWarning, match=r"unexpected head\.weight"):
        report = af.import_state(create(), tmp_path, strict=False)
    assert report.unexpected == ("head.weight",)
    assert torch.equal(report.state.params["first.bias"], model.first.bias)
    assert report.state.step == 1


def test_a_layer_that_was_thawed_later_counts_fewer_updates(tmp_path):
    """`step` is the largest count of updates, and a warning has both numbers."""
    more = {"step": torch.tensor(5.0)}
    accelerate(tmp_path, *trained(), lambda held: held["state"][0].update(more))
    words = "from 1 to 5 updates.*largest number, 5"
    with pytest.warns(af.errors.AccelfnWarning, match=words):
        assert af.import_state(create(), tmp_path).state.step == 5


def test_weights_alone_are_said_to_be(tmp_path):
    """Without an optimizer its state begins anew, and the report has it missing."""
    state = create()
    af.export_model(state, tmp_path / "out")
    report = af.import_state(create(seed=1), tmp_path / "out")
    assert report.missing == ("opt_state", "step")
    assert report.state.opt_state == {}
    assert torch.equal(report.state.params["first.bias"], state.params["first.bias"])


def test_an_optimizer_of_another_kind_is_refused(tmp_path):
    """Before a step would fail on what it kept, or begin it again."""
    _, folder = saved(tmp_path)
    sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.5)
    assert "SGD, has momentum_buffer" in refused(folder, create(sgd))
    assert "max_exp_avg_sq" in refused(folder, create(partial(ADAMW, amsgrad=True)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_what_an_optimizer_keeps_in_another_shape(tmp_path, dtype):
    """Rows and columns of a matrix come in the dtype of the parameter; the count as it was."""
    make = torch.optim.Adafactor
    model, optimizer = trained(make)
    accelerate(tmp_path, model, optimizer)
    state = af.import_state(create(make, lambda: Net().to(dtype)), tmp_path).state
    for name, param in model.named_parameters():
        kept = optimizer.state[param]
        assert kept.keys() == state.opt_state[name].keys()
        for key, value in state.opt_state[name].items():
            expected = kept[key] if key == "step" else kept[key].to(dtype)
            assert value.dtype is expected.dtype
            assert torch.equal(value, expected)


class Counting(torch.optim.SGD):
    """An optimizer that keeps a number, and cannot be tried on gradients of 0."""

    def step(self, closure: Any = None) -> Any:
        params = [p for group in self.param_groups for p in group["params"]]
        if not any(p.grad.any() for p in params):
            raise RuntimeError
        for param in params:
            self.state[param]["calls"] = self.state[param].get("calls", 0) + 3
        return super().step(closure)


def test_an_optimizer_that_cannot_be_tried_is_believed(tmp_path):
    """What it keeps is taken as it is, and numbers among it as numbers."""
    make = partial(Counting, lr=0.1)
    accelerate(tmp_path, *trained(make))
    state = af.import_state(create(make), tmp_path).state
    assert [each["calls"] for each in state.opt_state.values()] == [3] * 4


def test_an_optimizer_of_other_parameters_is_refused(tmp_path):
    """Strict or not: the names are told that the model does not have."""
    model, _ = trained()
    other = nn.ModuleDict({"other": model})
    optimizer = torch.optim.AdamW(other.named_parameters())
    model.first(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    accelerate(tmp_path, model, optimizer)
    for strict in (True, False):
        said = refused(tmp_path, strict=strict)
        assert "model lacks: other.first.bias, other.first.weight" in said


def test_names_and_shapes_that_differ_are_told(tmp_path):
    """All of them, with the nearest; without strict, those that are missing are a warning."""

    class Other(Net):
        def __init__(self) -> None:
            super().__init__()
            self.second = nn.Linear(3, 3)

    _, folder = saved(tmp_path)
    assert "missing second.weight" in refused(folder, create(net=Other))
    with pytest.warns(af.errors.AccelfnWarning, match=r"missing second\.weight"):
        report = af.import_state(create(net=Other), folder, strict=False)
    assert report.missing == ("second.weight", "second.bias")
    wider = create(net=partial(Net, 5))
    assert "first.weight saved as (3, 2)" in refused(folder, wider, strict=False)


def test_one_of_several_models_must_be_named(tmp_path):
    """Which of them is meant nobody guesses."""
    twin, _ = trained()
    model, folder = saved(tmp_path, twin=twin.state_dict())
    assert "models, under the keys 'model', 'twin'" in refused(folder)
    for key, module in (("model", model), ("twin", twin)):
        found = af.import_state(create(), folder, under=key).state
        assert torch.equal(found.params["first.weight"], module.first.weight)
    assert "missing first.weight" in refused(folder, under="neither")
    with pytest.raises(af.errors.ArgumentError, match="under=3"):
        af.import_state(create(), folder, under=3)


def test_an_optimizer_by_position_needs_its_groups(tmp_path):
    """Positions mean nothing where groups have other sizes."""
    model, optimizer = trained()
    accelerate(tmp_path, model, optimizer)
    (tmp_path / "scheduler.bin").touch()
    report = af.import_state(create(), tmp_path)
    assert report.unexpected == ("scheduler.bin",)
    assert report.state.step == 1
    first, *rest = model.parameters()
    accelerate(tmp_path, model, ADAMW([{"params": [first]}, {"params": rest}]))
    said = "has parameter groups of sizes [1, 3], but the state's optimizer has [4]"
    assert said in refused(tmp_path)


def test_what_else_lies_there_is_named(tmp_path):
    """Nothing that is read, a checkpoint of accelfn, or one of DeepSpeed."""
    assert "has no .metadata" in refused(tmp_path)
    af.save(create(), tmp_path / "own")
    assert "af.load(state," in refused(tmp_path / "own")
    (tmp_path / "zero_to_fp32.py").touch()
    assert "DeepSpeed" in refused(tmp_path)
    _, folder = saved(tmp_path)
    with pytest.raises(CheckpointError, match="af.import_state"):
        af.load(create(), folder)


def test_nothing_that_is_read_runs(tmp_path):
    """Code in the metadata, or in a file, is refused by its name."""
    bomb = Bomb(tmp_path / "ran")
    folder = edited(tmp_path, lambda records: setattr(records, "planner_data", bomb))
    assert "posix.mkdir" in refused(folder)
    accelerate(tmp_path, *trained(), lambda held: held.update(more=bomb))
    assert "run code" in refused(tmp_path)
    assert not (tmp_path / "ran").exists()


def in_another_folder(records):
    for info in records.storage_data.values():
        info.relative_path = f"../dcp/{info.relative_path}"


def at_another_tensor(records):
    places = {index.fqn: index for index in records.storage_data}
    weight, bias = places["model.first.weight"], places["model.first.bias"]
    records.storage_data[weight] = records.storage_data[bias]


def through_a_compressor(records):
    for index, info in records.storage_data.items():
        if index.fqn == "model.first.bias":
            info.transform_descriptors = ["zstd"]


def with_a_hole(records):
    chunks = records.state_dict_metadata["model.first.weight"].chunks
    chunks[0].sizes = torch.Size([2, 2])


RECORDS = [
    (in_another_folder, "not a file of the folder"),
    (at_another_tensor, r"expected a tensor of shape \(3, 2\).*at byte [0-9]+"),
    (through_a_compressor, "'model.first.bias' was saved in a form that accelfn"),
    (with_a_hole, "the pieces of 'model.first.weight'"),
]


@pytest.mark.parametrize(("change", "said"), RECORDS)
def test_records_that_are_not_of_the_files_are_refused(tmp_path, change, said):
    """Each with the tensor or the file, and the place in it."""
    assert re.search(said, refused(edited(tmp_path, change)), re.DOTALL)


def test_a_compressed_piece_is_refused(tmp_path):
    """A piece of a distributed checkpoint that was compressed is not read into memory."""
    _, folder = saved(tmp_path)
    for path in folder.glob("*.distcp"):
        # in the directories of zips, how each part is compressed
        method = re.compile(b"(PK\x01\x02.{6})\x00", re.DOTALL)
        path.write_bytes(method.sub(b"\\1\x08", path.read_bytes()))
    assert "is compressed, but torch.save never compresses" in refused(folder)


SPLIT = af.chain(af.shard_data(), af.wrap_fsdp())


@given(data=st.data())
def test_bytes_at_random_end_in_our_errors(tmp_path_factory, data):
    """Whatever is in the files of torch or of DeepSpeed, it is read or refused."""
    parent = tmp_path_factory.mktemp("broken")
    if data.draw(st.booleans()):
        stage = data.draw(st.sampled_from([2, 3]))
        training = Training(groups=[{"first.weight": torch.ones(3, 2)}], kept={})
        folder = write_zero(parent, training, stage=stage, ranks=2)
    else:
        _, folder = saved(parent)
    file = data.draw(st.sampled_from(sorted(folder.iterdir())))
    raw = bytearray(file.read_bytes())
    # how many there are differs from save to save
    place = st.integers(0, 100_000).map(lambda number: number % len(raw))
    if data.draw(st.booleans()):
        raw = raw[: data.draw(place)]
    else:
        for _ in range(data.draw(st.integers(1, 4))):
            raw[data.draw(place)] = data.draw(st.integers(0, 255))
    file.write_bytes(raw)
    with suppress(CheckpointError):
        af.import_state(create(), folder)


def test_a_rank_that_cannot_read_tells_the_others(tmp_path):
    """Of a split model all ranks import, or none does."""
    _, folder = saved(tmp_path)

    def run(world):
        state = create(world=world, setup=SPLIT)
        own = folder if world.rank == 0 else tmp_path / "nowhere"
        own.mkdir(exist_ok=True)
        return refused(own, state)

    first, second = simulate(2, run)
    assert first.startswith("Rank 1 could not read its files, so no rank loads")
    assert "nowhere has no .metadata" in second


def test_what_is_not_imported_is_its_own(tmp_path):
    """A state trains on from what it was given, and the one that it was given by stays."""
    state = linear_state(optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.5))
    step = af.make_step(lambda model, batch: model(batch).square().mean())
    state, _ = step(state, torch.ones(1, 1))
    af.export_model(state, tmp_path / "out")
    before = values(state)
    found = af.import_state(state, tmp_path / "out").state
    assert values(found) == before
    step(found, torch.ones(1, 1))
    assert values(state) == before
