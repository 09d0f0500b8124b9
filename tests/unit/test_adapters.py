# SPDX-License-Identifier: Apache-2.0
"""LoRA by the real package peft: the base stays, adapters are trained, saved and merged."""

from functools import partial

import peft
import pytest
import torch
import transformers as tf
from safetensors.torch import load_file

import accelfn as af
from accelfn.testing import simulate
from tests.states import bits

SIZES = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32}
CONFIG = tf.LlamaConfig(**SIZES, num_hidden_layers=1, num_attention_heads=2)
LORA = {"target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
ROWS = torch.randint(0, 32, (16, 8), generator=torch.Generator().manual_seed(0))
LAYOUTS = {
    "alone": (1, None),
    "ddp": (2, af.wrap_ddp()),
    "fsdp": (2, af.wrap_fsdp()),
    "fsdp with an average": (2, af.chain(af.wrap_fsdp(), af.ema(0.5))),
}


def adapted(**options):
    base = tf.LlamaForCausalLM(CONFIG).double()
    return peft.get_peft_model(base, peft.LoraConfig(r=2, **LORA, **options))


def create(world, parts, *, model=adapted, seed=0):
    return af.TrainState.create(
        model=model,
        optimizer=partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1),
        data=af.Data(ROWS, global_batch_size=8),
        setup=af.chain(af.shard_data(), parts),
        world=world,
        seed=seed,
    )


def trained(state):
    step = af.make_step(lambda model, batch: model(batch, labels=batch).loss)
    for batch in af.batches(state, until_epoch=2):
        state, _ = step(state, batch)
    return state


def gone_on(folder, parts, world):
    """Train, write all that can be written of it, and read the checkpoint again."""
    state = create(world, parts)
    before = af.full_params(state, at="eval")
    state = trained(state)
    af.save(state, folder / "saved", frozen="hash")
    af.save_pretrained(state, folder / "adapter", at="eval")
    af.export_model(state, folder / "whole", at="eval")
    with torch.no_grad():
        merged = af.snapshot_model(state, at="eval").merge_and_unload()
        said = merged(ROWS).logits
    loaded = af.load(create(world, parts), folder / "saved")
    assert bits(af.full_params(state, at="eval")) == bits(
        af.full_params(loaded, at="eval")
    )
    return before, af.full_params(state, at="train"), said


@pytest.mark.parametrize("layout", LAYOUTS)
def test_adapters_alone_are_trained_and_saved(tmp_path, layout):
    """The base keeps its bits, checkpoints and exports have adapters alone, and merge."""
    size, parts = LAYOUTS[layout]
    before, after, merged = simulate(size, partial(gone_on, tmp_path, parts))[0]
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    adapters = {name for name in before if "lora" in name}
    assert changed == adapters
    alone = simulate(1, lambda world: af.full_params(trained(create(world, None))))[0]
    torch.testing.assert_close(after, alone)

    written = [load_file(each) for each in (tmp_path / "saved").glob("*.safetensors")]
    params = {n for file in written for n in file if n.startswith("params.")}
    assert params == {f"params.{name}" for name in adapters}
    file = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert len(file) == len(adapters)
    whole = af.import_model(adapted(), tmp_path / "whole")
    base = tf.LlamaForCausalLM(CONFIG).double()
    kept = {k.replace("base_layer.", ""): v for k, v in before.items()}
    kept = {k.removeprefix("base_model.model."): v for k, v in kept.items()}
    base.load_state_dict({k: v for k, v in kept.items() if "lora" not in k})
    read = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    for model in (whole, read):
        with torch.no_grad():
            torch.testing.assert_close(merged, model.eval()(ROWS).logits)


def test_merging_what_is_lent_for_reading_leaves_the_state():
    """A frozen module is a copy: what is merged into it is in no state."""
    state = trained(create(None, None))
    before = bits(af.full_params(state))
    af.snapshot_model(state).merge_and_unload()
    assert before == bits(af.full_params(state))


def test_adapters_that_cannot_be_drawn_in_parts_are_refused():
    """A factory that writes zeros into a layer is told so by name."""

    def cut(world):
        af.TrainState.create(
            model=adapted,
            optimizer=torch.optim.SGD,
            setup=af.wrap_fsdp(),
            world=world,
            init="shard",
        )

    with pytest.raises(af.errors.ModelError, match=r"lora_B.*init=\"whole\""):
        simulate(2, cut)
