# SPDX-License-Identifier: Apache-2.0
"""One idea more: adapters. LoRA by the package peft, on a model whose own weights stay.

A small Llama that has read Python's help learns the tone of scikit-learn's descriptions.
"""

from functools import partial
from importlib.resources import files
from pydoc_data.topics import topics

import peft
import torch
import transformers as tf
from torch import Tensor, nn

import accelfn as af

LENGTH, BASE = 32, "python-help"  # neither folder is there yet
ADAPTER, MERGED = "python-help-lora", "python-help-merged"
WIDTHS = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 64}
LAYERS = {"num_hidden_layers": 2, "num_attention_heads": 4}
LORA = {"r": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}


def helps() -> str:
    """Return what Python says of its own words."""
    return "\n".join(topics.values())


def descriptions() -> str:
    """Return what scikit-learn says of its data."""
    about = sorted(
        files("sklearn.datasets.descr").iterdir(), key=lambda file: file.name
    )
    return "\n".join(f.read_text("utf-8") for f in about if f.name.endswith(".rst"))


def rows_of(text: str) -> Tensor:
    """Return a text as rows of characters."""
    codes = torch.tensor(list(text.encode("ascii", "ignore")))
    return codes[: len(codes) // LENGTH * LENGTH].reshape(-1, LENGTH)


def base() -> nn.Module:
    """Return a model that has read nothing."""
    return tf.LlamaForCausalLM(tf.LlamaConfig(**WIDTHS, **LAYERS))


def adapted() -> nn.Module:
    """Return a model that has read Python's help, with adapters, which alone are trained."""
    return peft.get_peft_model(af.import_model(base, BASE), peft.LoraConfig(**LORA))


def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
    """Return the loss, which the model computes."""
    return model(input_ids=batch, labels=batch).loss


def train(
    world: af.World, parts: af.Transform | None, updates: int = 80
) -> tuple[float, ...]:
    """Train a model, then adapters; save both; return the losses before and after."""
    both = {"setup": af.chain(af.shard_data(), parts), "world": world}
    state = af.TrainState.create(
        **both,
        model=base,
        optimizer=partial(torch.optim.AdamW, lr=0.01),
        data=af.Data(rows_of(helps()), global_batch_size=32, shuffle=True),
    )
    step = af.make_step(loss_fn)
    af.export_model(af.run(state, step, until=updates), BASE)
    rows = rows_of(descriptions())
    state = af.TrainState.create(
        **both,
        model=adapted,
        optimizer=partial(torch.optim.AdamW, lr=0.01),
        data=af.Data(rows[: len(rows) * 4 // 5], global_batch_size=32, shuffle=True),
    )
    tests = af.Data(rows[len(rows) * 4 // 5 :], global_batch_size=64)
    before = af.evaluate(state, tests, loss_fn)["loss"]
    state = af.run(state, step, until=updates)
    af.save_pretrained(state, ADAPTER)  # the adapters alone
    merged = af.snapshot_model(
        state
    ).merge_and_unload()  # whole, on each rank, and a copy
    if world.is_main:
        merged.save_pretrained(MERGED)
    return before, af.evaluate(state, tests, loss_fn)["loss"]


if __name__ == "__main__":
    tf.utils.logging.disable_progress_bar()
    with af.World.from_env(device="cpu") as world:
        before, after = train(world, af.wrap_fsdp())
        if world.is_main:
            model = tf.AutoModelForCausalLM.from_pretrained(MERGED)
            said = model(input_ids=rows_of(descriptions())[-64:])
            print(f"held-out loss {before:.2f}, with adapters {after:.2f}")
            print("a model like any other:", type(model).__name__, *said.logits.shape)
