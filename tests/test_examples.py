# SPDX-License-Identifier: Apache-2.0
"""Test that every example runs, is short, and learns or shows what its docstring says."""

import re
from collections.abc import Callable
from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from itertools import islice
from math import prod
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

import accelfn as af
from accelfn.testing import simulate
from tests.processes import run_ranks
from tests.scripts import run_script

FOLDER = Path(__file__).parents[1] / "examples"
SCRIPTS = sorted(FOLDER.glob("[0-9]*.py"))
WEIGHTS = "model.safetensors"
OF_IMPORTS = r"torchao|torch/utils/_pytree|gemm_4bit"
"""What packages print that Transformers and peft import if they are installed."""


def output_of(
    folder: Path, name: str, size: int = 1, *, noise: str = r"(?!)", axes: str = ""
) -> str:
    """Run a script in a folder of its own; return what its ranks print.

    It writes no errors and warnings, but for lines in which others make a noise.
    """
    asked = {"ACCELFN_AXES": axes} if axes else {}
    ran = run_script(FOLDER / name, folder, size, **asked)
    said = [line for line in ran.err.splitlines() if not re.search(noise, line)]
    assert (ran.codes, said) == ([0] * size, [])
    return ran.out


def example(name: str) -> ModuleType:
    """Return a script as a module; its name is not one that `import` takes."""
    spec = spec_from_file_location(name.removesuffix(".py"), FOLDER / name)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def floats(pattern: str, text: str) -> list[float]:
    return [float(number) for number in re.findall(pattern, text)]


def percentages(text: str) -> list[float]:
    return floats(r"([\d.]+)%", text)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_an_example_is_short_and_asks_for_nothing(script):
    """An example is under 100 lines, and reads neither arguments nor environment."""
    text = script.read_text(encoding="utf-8")
    assert len(text.splitlines()) < 100
    assert re.findall(r"argparse|sys\.argv|os\.environ|getenv", text) == []


def test_the_readme_lists_every_example():
    """The table in the examples' README names each script once, in order, and the notebook."""
    table = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert sorted(each.name for each in FOLDER.glob("[0-9]*")) == re.findall(
        r"^\| `(\d\d_\w+\.\w+)`", table, re.MULTILINE
    )


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 1])
def test_digits_are_learnt(tmp_path, size):
    """The first example reads 97 % of the held-out digits, and says so once."""
    printed = output_of(tmp_path, "01_digits.py", size)
    assert printed.count("held-out loss") == 1
    assert len(percentages(printed)) == 15
    assert percentages(printed)[-1] >= 97.0


# a float32 loss of 2.3 is known to 2e-7; 345 updates may let that grow
ROUNDING = {"rel": 1e-4, "abs": 2e-6}


def losses_of_digits(world: af.World, num_micro_batches: int) -> list[float]:
    """Return the loss of each update of the first example, with another setup."""
    setup = af.chain(
        af.shard_data(),
        af.wrap_ddp(),
        af.accumulate(num_micro_batches=num_micro_batches),
    )
    history = example("01_digits.py").train(world, setup)
    return [metrics.all_reduce_mean(world)["loss"] for metrics in history]


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_micro_batches_and_ranks_do_not_change_the_losses():
    """At each update the loss is that of whole batches, up to float32 rounding."""
    alone = partial(losses_of_digits, af.World.single(device="cpu"))
    first, second = run_ranks(2, losses_of_digits, 3)
    assert first == second
    for losses in (alone(5), first):
        assert pytest.approx(alone(1), **ROUNDING) == losses


def local_sgd_on(world: af.World) -> list[str]:
    train = example("03_local_sgd.py").train
    return [train(world, way) for way in (af.wrap_ddp(), af.local_sgd(sync_every=8))]


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_local_sgd_talks_an_eighth_as_often():
    """DDP reduces in each of 345 updates; local_sgd every 8, and once at the end; one, never."""
    alone = local_sgd_on(af.World.single(device="cpu"))
    (ddp, local), _ = run_ranks(2, local_sgd_on)
    assert [int(said.split()[0]) for said in (*alone, ddp, local)] == [0, 0, 345, 44]
    assert percentages(alone[0]) == percentages(alone[1])
    assert min(percentages(ddp + local)) >= 97.0


# what a script prints


def rises(*numbers: float) -> bool:
    return list(numbers) == sorted({*numbers})


def differs_by_rounding(printed: str) -> bool:
    """Micro-batches differ from the whole by the rounding of each precision."""
    exact, coarse = floats(r"differ by (\S+),", printed)
    return rises(exact, 1e-4, coarse, 0.1) and min(percentages(printed)) >= 95


def is_custom(printed: str) -> bool:
    """Sharpness-aware minimisation generalises better from few images."""
    plain, sam = floats(r"loss ([\d.]+)", printed)
    return sam < plain and rises(85, *percentages(printed))


def survives_spikes(printed: str) -> bool:
    """Broken images ruin plain SGD, and `clip_spikes` saves it."""
    plain, *others = percentages(printed)
    shown = "(clip_spikes(1.5), af.ema(0.98))" in printed
    return plain < 90 and min(others) >= 95 and shown


def is_a_ring(printed: str) -> bool:
    """The points have the true ones' mean and covariance; of a disc the last would be 0.24."""
    true, made = (floats(r"(-?\d\.\d+)", line) for line in printed.splitlines())
    return true[:6] == pytest.approx(made[:6], abs=0.06) and made[6] < 0.2


def reads_more_on_a_plateau(printed: str) -> bool:
    """The rate falls as the held-out loss stalls, and more digits are read than without."""
    rates, (without, with_it) = floats(r"rate (\S+)", printed), percentages(printed)
    falls = len(rates) >= 2 and rates == sorted(rates, reverse=True)
    return falls and with_it > max(without, 98)


def wins(printed: str) -> bool:
    """The player wins more often, and some rollouts serve fewer epochs than others."""
    first, *_, last = percentages(printed)
    return first < 3 and last > 5 and len(set(floats(r"(\d) epochs", printed))) > 1


LEARNS: dict[str, Callable[[str], bool]] = {
    "02_big_batches": differs_by_rounding,
    "05_custom_step": is_custom,
    "06_your_own_transform": survives_spikes,
    "09_gan": is_a_ring,
    # a student that is taught reads more digits than one that learns alone
    "10_distillation": lambda p: (
        percentages(p)[1] + 2 < percentages(p)[2] < percentages(p)[0]
    ),
    # held-out pairs are found the right way round far more often than before
    "11_dpo": lambda p: percentages(p)[0] < 75 and percentages(p)[1] > 95,
    "14_plateau": reads_more_on_a_plateau,
    # after as many updates, the loss is less than half of SGD's
    "27_kfac": lambda p: (
        floats(r"loss ([\d.]+)", p)[1] < floats(r"loss ([\d.]+)", p)[0] / 2
    ),
    "28_ppo": wins,
    # runs that copy the best end with less than half of the loss of runs that do not
    "29_population": lambda p: (
        floats(r"loss ([\d.]+)", p)[11] < floats(r"loss ([\d.]+)", p)[-1] / 2
    ),
}
ALONE = ("02_big_batches", "05_custom_step", "06_your_own_transform")
"""Which are run on one process only."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "size"), [(script, 1 if script in ALONE else 2) for script in LEARNS]
)
def test_an_example_learns(tmp_path, script, size):
    """What it prints shows what its docstring says."""
    printed = output_of(tmp_path, f"{script}.py", size)
    assert LEARNS[script](printed), printed


@pytest.mark.slow
def test_a_resumed_run_has_the_same_bits(tmp_path):
    """A run that is stopped in mid-epoch ends bitwise as the uninterrupted one.

    The checkpoint that an earlier run left is no obstacle.
    """
    (tmp_path / "digits-checkpoint").mkdir()

    printed = output_of(tmp_path, "04_save_and_resume.py", 2)
    assert "step 40, epoch 1 sample 704" in printed
    assert printed.endswith("resumed has the bits of whole: True\n")
    assert (tmp_path / "digits-checkpoint" / "manifest.json").is_file()


@pytest.mark.slow
def test_ranks_in_a_test(tmp_path):
    """Four ranks train what one trains, and show the bug that one hides."""
    printed = output_of(tmp_path, "07_ranks_in_a_test.py")
    apart = re.search(r"at most (\S+) apart", printed)
    assert apart is not None
    assert float(apart.group(1)) < 1e-12
    assert "SharedNoise() keeps the laws" in printed
    assert "GradNoise() breaks the law 'replicas_agree'" in printed


@pytest.mark.slow
def test_a_streamed_text(tmp_path):
    """The loss falls; started again, the last updates write the very same text."""
    *told, text = output_of(tmp_path, "08_streamed_text.py").splitlines()
    losses = floats(r"loss': ([\d.]+)", "\n".join(told))
    assert [each.split(",")[0] for each in told] == [
        f"update {number}" for number in range(50, 301, 50)
    ]
    assert losses[-1] < losses[0] < 3.0
    assert text.startswith("'The statement is")
    assert output_of(tmp_path, "08_streamed_text.py").splitlines() == [text]


@pytest.mark.slow
def test_a_transformers_model(tmp_path):
    """It learns; what it saved is read by Transformers alone, and knows two new sentences."""
    printed = output_of(tmp_path, "13_transformers.py", 2, noise=OF_IMPORTS)
    found = floats(r"'right': ([\d.]+)", printed)
    assert len(found) == 5
    assert found[-1] > 0.85
    assert printed.endswith("Python 0, scikit-learn 1: [0, 1]\n")
    saved = {each.name for each in (tmp_path / "bert-of-sentences").iterdir()}
    assert saved >= {"config.json", "model.safetensors", "tokenizer.json"}


@pytest.mark.slow
def test_adapters_alone_are_trained(tmp_path):
    """They lower the loss on another text; Transformers alone reads the merged model."""
    noise = rf"{OF_IMPORTS}|is_gradient_checkpointing|^  warnings\.warn"
    printed = output_of(tmp_path, "20_lora.py", noise=noise)
    before, after = floats(r"(?:loss|adapters) ([\d.]+)", printed)
    assert after < before - 0.05
    assert "a model like any other: LlamaForCausalLM 64 32 128" in printed
    with safe_open(
        tmp_path / "python-help-lora/adapter_model.safetensors", "pt"
    ) as file:
        assert all("lora" in name for name in file.keys())  # noqa: SIM118 - no mapping


def gradients_of_sam(world: af.World) -> dict[str, Tensor]:
    """Return the parameters after three steps of the fifth example's SAM, in float64."""
    module = example("05_custom_step.py")
    images = torch.linspace(-1, 1, 12 * 64, dtype=torch.float64).cos()
    state = af.TrainState.create(
        model=lambda: module.net().double(),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        data=af.Data(
            (images.reshape(12, 1, 8, 8), torch.arange(12) % 10), global_batch_size=6
        ),
        setup=af.chain(af.shard_data(), af.wrap_ddp()),
        world=world,
    )
    for batch in islice(af.batches(state), 3):
        state, _ = module.sam_step(state, batch)
    return dict(state.params)


@pytest.mark.parametrize("size", [2, 4])
def test_sam_on_ranks_is_sam_on_one(size):
    """Both gradients of its step are those of the whole batch, up to rounding of float64."""
    (alone,) = simulate(1, gradients_of_sam)
    for found in simulate(size, gradients_of_sam):
        torch.testing.assert_close(found, alone, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
def test_a_run_is_tracked(tmp_path):
    """The example tracks a falling loss and throughput and memory, once for all ranks."""
    printed = output_of(tmp_path, "12_tracking.py", 2)
    first, last = floats(r"\d\.\d+", printed)
    log = af.track.read(tmp_path / "digits.jsonl")
    assert last < first / 4
    shown = {"loss", "grad_norm", "updates_per_second", "memory_bytes"}
    assert shown <= set(log.metrics)
    assert (len(log.times), log.superseded) == (29, 0)


@pytest.mark.slow
def test_a_sharded_text_goes_on_with_one_process(tmp_path):
    """Two processes hold halves and save them; one goes on, and the loss falls further."""
    first = output_of(tmp_path, "15_sharded_text.py", 2)
    second = output_of(tmp_path, "15_sharded_text.py")
    assert first.startswith("from update 0, on 2 ranks\nto update 60, held-out")
    assert second.startswith("from update 60, on 1 ranks\nto update 120, held-out")
    before, after = floats(r"'loss': ([\d.]+)", first + second)
    assert after < before < 2.5
    here, whole = re.findall(r"parameters +([\d.]+) KiB +([\d.]+) KiB", first)[0]
    assert 2 * float(here) == float(whole)
    for step in (60, 120):
        with safe_open(tmp_path / f"sharded-text-{step}" / WEIGHTS, "pt") as file:
            assert file.get_tensor("blocks.1.up.weight").shape == (256, 64)


SPLITS = [
    ("16_long_text", "cp"),
    ("17_wide_layers", "tp"),
    ("18_megatron_layers", "tp"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("script", "axis"), SPLITS)
def test_texts_and_layers_are_split_between_two_processes(tmp_path, script, axis):
    """Two have half of every text or layer each, and the loss of one that has them whole."""
    two = output_of(tmp_path, f"{script}.py", 2, axes=f"{axis}=2")
    one = output_of(tmp_path, f"{script}.py")
    assert two.startswith(f"axes {{'{axis}': 2}}, last loss")
    losses = [floats(r"loss ([\d.]+)", each)[0] for each in (one, two)]
    assert losses[0] == pytest.approx(losses[1], abs=5e-3)
    assert losses[0] < 3.3


@pytest.mark.parametrize(("script", "axis"), SPLITS)
def test_split_texts_and_layers_are_those_of_one_rank(script, axis):
    """However they and samples are split, the loss is that of one rank."""
    train = partial(example(f"{script}.py").train, num_updates=3)
    losses = [
        each["loss"]
        for axes in ({axis: 1}, {axis: 2}, {"dp_shard": 2, axis: 2})
        for each in simulate(prod(axes.values()), train, axes=axes)
    ]
    assert pytest.approx([losses[0]] * 7, **ROUNDING) == losses


def lora(parts: af.Transform | None) -> Callable[[af.World], dict[str, float]]:
    return partial(example("20_lora.py").train, updates=2, parts=parts)


def sharded_text(num_updates: int) -> Callable[[af.World], dict[str, float]]:
    return partial(example("15_sharded_text.py").train, num_updates=num_updates)


@pytest.mark.parametrize(
    "runs",
    [
        # adapters: on one rank, under DDP and under FSDP, before and after
        [[(1, lora(None))], [(2, lora(af.wrap_ddp()))], [(2, lora(af.wrap_fsdp()))]],
        # the held-out loss, however many ranks train, and go on
        [
            [(1, sharded_text(12))],
            [(size, sharded_text(6)) for size in (2, 3)],
            [(size, sharded_text(6)) for size in (4, 1)],
        ],
    ],
    ids=["20_lora", "15_sharded_text"],
)
def test_losses_are_those_of_one_rank(runs, tmp_path, monkeypatch):
    """On any ranks, also if others go on."""
    found = []
    for number, run in enumerate(runs):
        (tmp_path / str(number)).mkdir()
        monkeypatch.chdir(tmp_path / str(number))
        *_, last = [simulate(size, train).results for size, train in run]
        found += last
    for each in found:
        assert each == pytest.approx(found[0], **ROUNDING)


@pytest.mark.slow
def test_talking_less_costs_little():
    """Each way reads 95 % of the held-out digits, and sends what it says."""
    talking = example("19_talking_less.py")
    sent: dict[str, int] = {}
    for says, way in talking.WAYS.items():
        run = simulate(2, partial(talking.train, way=way))
        sent[says] = sum(each.num_bytes for each in run.log if each.step is not None)
        assert run[0]["accuracy"] >= 0.95, says
    every = sent["DDP"]
    assert sent["DDP in 16 bits"] == pytest.approx(every / 2, rel=0.01)
    assert sent["local SGD"] == pytest.approx(every / 8, rel=0.03)
    assert sent["DiLoCo"] == pytest.approx(every / 8, rel=0.03)


def test_what_fits_a_cable_is_told_without_the_model(capsys):
    """Of two layers' parameters an update sends 4 bytes a rank, or 2, or an eighth of 4."""
    fits = example("22_which_method_fits.py")
    fits.main(layers=2)
    rows = [
        re.findall(r"[\d.,]+", line) for line in capsys.readouterr().out.splitlines()
    ]
    config = fits.LlamaConfig(num_hidden_layers=2)
    with af.empty_weights():
        model = fits.LlamaForCausalLM(config)
    params = sum(p.numel() for p in model.parameters())
    layers = sum(p.numel() for p in model.model.layers.parameters())
    gathered = 4 * params + 2 * layers  # layers once more, in the backward pass
    for num_bytes in (4 * params, 2 * params, gathered, 4 * params / 8):
        assert any(f"{num_bytes / 1e9:.2f}" in row for row in rows), rows
