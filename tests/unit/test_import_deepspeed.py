# SPDX-License-Identifier: Apache-2.0
"""`import_state` of DeepSpeed's folders: what is refused, and in which words; where they lie."""

import sys
import types
from functools import partial

import attrs
import pytest
import torch
from torch import nn

import accelfn as af
from accelfn.errors import CheckpointError
from tests.checkpoints import Bomb
from tests.internals import deepspeed
from tests.states import values
from tests.zero_folders import Training, write_zero

ADAMW = partial(torch.optim.AdamW, lr=0.1)
stages = pytest.mark.parametrize("stage", [1, 3])


class Net(nn.Module):
    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(2, width)
        self.register_buffer("seen", torch.zeros(()))


WEIGHTS = {
    "first.weight": torch.arange(6.0).view(3, 2),
    "first.bias": torch.arange(3.0) + 10,
}
TRAINING = Training(
    groups=[WEIGHTS],
    kept={
        "exp_avg": {n: t + 100 for n, t in WEIGHTS.items()},
        "exp_avg_sq": {n: t + 200 for n, t in WEIGHTS.items()},
    },
    buffers={"seen": torch.tensor(4.0)},
)


def create(make=ADAMW, net=Net):
    return af.TrainState.create(model=net, optimizer=make)


def saved(folder, stage=2, ranks=2, **options):
    return write_zero(folder / "zero", TRAINING, stage=stage, ranks=ranks, **options)


def change_all(files, change):
    """Change what is in files of torch's."""
    for file in files:
        held = torch.load(file)
        change(held)
        torch.save(held, file)


def flat_of(held):
    """Return an optimizer's state of a rank, of flat tensors."""
    held = held["optimizer_state_dict"]
    return held.get("base_optimizer_state") or held["optimizer_state_dict"]


def refused(folder, state=None, **options):
    with pytest.raises(CheckpointError) as caught:
        af.import_state(state or create(), folder, **options)
    return str(caught.value)


@stages
def test_the_folder_or_a_tag_s_in_it(tmp_path, stage):
    """The newest is read, or the one that is named; what else lies there is told."""
    tag = saved(tmp_path, stage)
    other = attrs.evolve(TRAINING, buffers={"seen": torch.tensor(9.0)})
    write_zero(tmp_path / "more", other, stage=stage, ranks=1, tag="older")
    (tmp_path / "more" / "older").rename(tag.parent / "older")
    (tag.parent / "scheduler.bin").touch()
    report = af.import_state(create(), tag.parent)
    assert set(report.unexpected) == {"older", "scheduler.bin"}
    assert float(report.state.buffers["seen"]) == 4.0
    assert report.state.step == 2
    for folder, seen in ((tag, 4.0), (tag.parent / "older", 9.0)):
        report = af.import_state(create(), folder)
        assert (report.missing, report.unexpected) == ((), ())
        assert float(report.state.buffers["seen"]) == seen


def test_a_folder_of_accelerate_s_save_state(tmp_path):
    """Of a training with DeepSpeed it has a tag's folder, by its own name, and more."""
    tag = saved(tmp_path, tag="pytorch_model", lr_scheduler={"last_epoch": 1})
    (tag.parent / "random_states_0.pkl").touch()
    report = af.import_state(create(), tag.parent)
    assert report.unexpected == ("lr_scheduler", "random_states_0.pkl")
    assert torch.equal(report.state.params["first.bias"], WEIGHTS["first.bias"])


def test_where_no_optimizer_counts_the_engine_does(tmp_path):
    """Updates that a loss scale left out are none."""
    kept = {"momentum_buffer": WEIGHTS}
    training = attrs.evolve(TRAINING, kept=kept, counts=False, steps=5)
    write_zero(tmp_path / "zero", training, stage=2, ranks=2)
    make = partial(torch.optim.SGD, lr=0.1, momentum=0.5)
    assert af.import_state(create(make), tmp_path / "zero").state.step == 5


def test_a_group_counts_for_those_that_were_stepped():
    """What has no state was not: a part that is frozen, or that no loss reached."""
    groups = [{"params": [0, 1], "step": 3}, {"params": [2]}]
    inner = {"param_groups": groups, "state": {0: {"exp_avg": 1}, 2: {"step": 2}}}
    entries = [*deepspeed._entries_of_groups(inner)]
    assert entries == [{"step": 3, "exp_avg": 1}, {}, {"step": 2}]


def test_a_step_that_a_group_counts(tmp_path):
    """DeepSpeed's fused Adam counts in its groups, and whole numbers elsewhere."""
    tag = saved(tmp_path, ranks=1)

    def change(held):
        inner = flat_of(held)
        del inner["state"][0]["step"]
        inner["param_groups"][0]["step"] = 6

    change_all(tag.glob("*_optim_states.pt"), change)
    state = af.import_state(create(), tag).state
    assert state.step == 6
    assert state.opt_state["first.bias"]["step"].dtype is torch.float32


@stages
@pytest.mark.parametrize("product", [torch.tensor(0.25), 0.25])
def test_a_number_that_an_optimizer_keeps_of_each_parameter(tmp_path, stage, product):
    """Of all that lies in a flat group each parameter has its own, beside its parts of tensors."""
    tag = saved(tmp_path, stage)
    more = {"mu_product": product}
    files = tag.glob("*_optim_states.pt")
    change_all(files, lambda held: flat_of(held)["state"][0].update(more))
    state = af.import_state(create(partial(torch.optim.NAdam, lr=0.1)), tag).state
    for name, tensor in WEIGHTS.items():
        kept = state.opt_state[name]
        assert float(kept["mu_product"]) == 0.25
        assert torch.equal(kept["exp_avg"], tensor + 100)
        assert torch.equal(kept["exp_avg_sq"], tensor + 200)
    if isinstance(product, torch.Tensor):  # an update writes into each
        places = {state.opt_state[n]["mu_product"].data_ptr() for n in WEIGHTS}
        assert len(places) == len(WEIGHTS)


@stages
def test_a_rank_s_file_that_is_missing_is_named(tmp_path, stage):
    """Before anything is read of the others."""
    tag = saved(tmp_path, stage, ranks=3)
    name = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    (tag / name).unlink()
    said = refused(tag.parent)
    assert f"only those of ranks [0, 2] exist: {name} is missing" in said
    assert "Copy the complete folder" in said


def test_the_model_s_file_is_missed(tmp_path):
    """At stage 3 each rank's, for frozen parameters are cut, too."""
    tag = saved(tmp_path)
    (tag / "mp_rank_00_model_states.pt").unlink()
    assert "has no mp_rank_00_model_states.pt" in refused(tag)
    tag = saved(tmp_path / "other", 3)
    (tag / "zero_pp_rank_1_mp_rank_00_model_states.pt").unlink()
    assert "has no zero_pp_rank_1_mp_rank_00_model_states.pt" in refused(tag)


@stages
def test_parts_of_two_saves_are_told(tmp_path, stage):
    """A rank's file of a save by other ranks, left behind or exchanged."""
    tag = saved(tmp_path, stage, ranks=3)
    less = saved(tmp_path / "other", stage, ranks=2)
    for file in less.iterdir():
        file.replace(tag / file.name)
    assert "is one of 2 files" in refused(tag)
    assert "another number of ranks" in refused(tag)


@stages
def test_sizes_that_do_not_fit_are_told(tmp_path, stage):
    """Of the model's file and the optimizer's one is another's."""
    tag = saved(tmp_path, stage)
    wider = {n: torch.zeros(9, *t.shape[1:]) for n, t in WEIGHTS.items()}
    other = attrs.evolve(TRAINING, groups=[wider], kept={})
    there = write_zero(tmp_path / "other", other, stage=stage, ranks=2)
    for file in there.glob("*optim_states.pt"):
        file.replace(tag / file.name)
    assert "the files are from different saves" in refused(tag)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("mp_rank_01_model_states.pt", "split over ranks (it has mp_rank_01)"),
        ("layer_00-model_00-model_states.pt", "by pipeline parallelism"),
        ("layer_0_expert_1_mp_rank_00_model_states.pt", "a mixture of experts"),
        ("expp_rank_0_mp_rank_00_optim_states.pt", "a mixture of experts"),
        ("offloaded_tensors", "on NVMe"),
    ],
)
def test_what_is_cut_by_more_is_refused(tmp_path, name, said):
    """Split models, pipelines, experts, and optimizers in other files, by a sentence each."""
    tag = saved(tmp_path)
    (tag / name).touch()
    assert said in refused(tag.parent)
    assert "at ZeRO stages 1, 2 and 3" in refused(tag)


def test_universal_folders_and_stage_0_are_refused(tmp_path):
    """Neither has parts of an optimizer."""
    tag = saved(tmp_path)
    for file in tag.glob("*optim_states.pt"):
        file.unlink()
    assert "It was saved with ZeRO stage 0, or files are missing" in refused(tag)
    (tag / "zero").mkdir()
    assert "is a universal checkpoint" in refused(tag)


def test_which_folder_is_meant_is_said(tmp_path):
    """`latest` that names nothing, or no `latest` at all."""
    tag = saved(tmp_path)
    latest = tag.parent / "latest"
    latest.write_text("../zero/global_step2")
    assert "the DeepSpeed folders there are: global_step2" in refused(tag.parent)
    latest.unlink()
    assert f"af.import_state(state, {str(tag)!r})" in refused(tag.parent)
    with pytest.raises(CheckpointError, match="af.import_state"):
        af.load(create(), tag.parent)


@stages
def test_names_and_shapes_that_differ_are_told(tmp_path, stage):
    """With the nearest; names that are missing are a warning without strict."""

    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.firsts = nn.Linear(2, 3)

    tag = saved(tmp_path, stage)
    said = refused(tag, create(net=Other))
    assert "missing firsts.bias (similar: first.bias)" in said
    assert "unexpected seen" in said
    with pytest.warns(af.errors.AccelfnWarning, match=r"missing firsts\.bias"):
        report = af.import_state(create(net=Other), tag, strict=False)
    assert "opt_state" in report.missing
    wider = create(net=partial(Net, 5))
    assert "first.weight saved as (3, 2)" in refused(tag, wider, strict=False)


def test_what_an_optimizer_keeps_of_other_sizes_is_refused(tmp_path):
    """A tensor that is neither as long as the weights nor a number."""
    tag = saved(tmp_path)
    file, less = (
        "zero_pp_rank_1_mp_rank_00_optim_states.pt",
        {"exp_avg": torch.zeros(1)},
    )
    change_all([tag / file], lambda held: flat_of(held)["state"][0].update(less))
    assert "'exp_avg' has the shapes [(6,), (1,)] on the ranks" in refused(tag)


@stages
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda held: held.pop("param_shapes"), "has no shapes of parameters"),
        (lambda held: held.update(param_shapes=None), "has no shapes of parameters"),
        (lambda held: held["param_shapes"].append({}), "1 parameter groups, but the"),
        (lambda held: held["param_shapes"].clear(), "but the model file has 0"),
    ],
)
def test_a_model_s_file_of_another_save_is_told(tmp_path, stage, change, said):
    """Without shapes, or with more groups than ranks have: which file, and what it has."""
    tag = saved(tmp_path, stage)
    change_all(tag.glob("*model_states.pt"), change)
    text = refused(tag)
    assert said in text
    assert str(tag) in text


@stages
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("count", [1, 2])
def test_parts_of_another_kind_are_told(tmp_path, stage, rank, count):
    """Weights that are not flat, or are more than what is kept of them, in any rank's file."""
    key = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"

    def change(held):
        held = held["optimizer_state_dict"]
        flat = [*held[key]]
        held[key] = flat * 2 if count == 2 else [each[None] for each in flat]

    tag = saved(tmp_path, stage)
    file = tag / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
    change_all([file], change)
    text = refused(tag)
    assert f"{count} flat tensors of weights, and 1 entries" in text
    assert str(file) in text


def test_an_optimizer_s_state_that_is_elastic_is_read(tmp_path):
    """As older versions write it, a table for each group and none around them: the same."""
    tag = saved(tmp_path)
    expected = values(af.import_state(create(), tag).state)

    def elastic(held):
        inner = flat_of(held)
        groups = [place for group in inner["param_groups"] for place in group["params"]]
        tables = [inner["state"][place] for place in groups]
        held["optimizer_state_dict"]["base_optimizer_state"] = tables

    change_all(tag.glob("*optim_states.pt"), elastic)
    assert values(af.import_state(create(), tag).state) == expected


@pytest.mark.parametrize("file", ["optim", "model"])
def test_what_a_file_brings_along_is_named(tmp_path, file):
    """And not run, whichever file has it; the advice is of DeepSpeed."""
    tag = saved(tmp_path)
    bomb = Bomb(tmp_path / "ran")
    change_all(tag.glob(f"*{file}_states.pt"), lambda held: held.update(mine=bomb))
    said = refused(tag)
    assert "posix.mkdir" in said
    assert "client_state" in said
    assert not (tmp_path / "ran").exists()


@stages
def test_objects_of_deepspeed_stay_shut(tmp_path, monkeypatch, stage):
    """Their classes are not asked for: what any of the files says of them is left."""
    ran: list[str] = []
    names = {
        "deepspeed.runtime.fp16.loss_scaler": "DynamicLossScaler",
        "deepspeed.utils.tensor_fragment": "fragment_address",
    }
    objects = []
    monkeypatch.setitem(sys.modules, "deepspeed", types.ModuleType("deepspeed"))
    for module, name in names.items():
        kind = type(name, (), {"__module__": module})
        monkeypatch.setitem(sys.modules, module, types.ModuleType(module))
        setattr(sys.modules[module], name, kind)
        kind.__setstate__ = lambda own, state: ran.append(str((own, state)))
        objects.append(kind())
        objects[-1].scale = 3
    tag = saved(tmp_path, stage)
    more = {"loss_scaler": objects, "dynamic_loss_scale": True}
    files = [tag / "zero_pp_rank_0_mp_rank_00_optim_states.pt"]
    change_all(files, lambda held: held["optimizer_state_dict"].update(more))
    change_all(tag.glob("*model_states.pt"), lambda held: held.update(mine=objects))
    report = af.import_state(create(), tag)
    assert ran == []
    assert set(report.unexpected) == {"mine", "loss_scaler"}
    known = torch.serialization.get_safe_globals()  # others' stay, and ours are gone
    assert [each for each in known if isinstance(each, tuple)] == []
