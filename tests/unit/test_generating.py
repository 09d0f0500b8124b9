# SPDX-License-Identifier: Apache-2.0
"""A model of Transformers generates over ranks: every text once, in order, of any length."""

from functools import partial

import pytest
import torch
from torch.nn.functional import pad
from transformers import LlamaConfig, LlamaForCausalLM

import accelfn as af
from accelfn.testing import simulate

SIZES = {"vocab_size": 12, "hidden_size": 8, "intermediate_size": 8}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
CONFIG = LlamaConfig(num_hidden_layers=1, num_attention_heads=2, **SIZES, **TOKENS)
MOST = 5
GREEDY = {"max_new_tokens": MOST, "do_sample": False}


def padded(items):
    longest = max(map(len, items))
    ids = torch.tensor([[0] * (longest - len(each)) + each for each in items])
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


def create(world, setup=None):
    return af.TrainState.create(
        model=lambda: LlamaForCausalLM(CONFIG).double(),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        setup=setup,
        world=world,
    )


def answers(model, batch):
    whole = model.generate(**batch, **GREEDY)
    new = whole[:, batch["input_ids"].shape[1] :]
    return pad(new, (0, MOST - new.shape[1]))


def of_a_dataset(prompts, world):
    state = create(world, af.chain(af.shard_data(), af.wrap_ddp()))
    data = af.Data(prompts, global_batch_size=3, collate=padded)
    return [each[each != 0].tolist() for each in af.predict(state, data, answers)]


def of_a_list(prompts, setup, world):
    model, found = af.snapshot_model(create(world, setup)), []
    for prompt in af.split_over_ranks(prompts, world):
        (whole,) = model.generate(**padded([prompt]), **GREEDY)
        found.append(whole[len(prompt) :].tolist())
    return [each for part in af.all_gather_objects(found, world) for each in part]


@pytest.mark.parametrize("count", [1, 4, 7])
def test_texts_are_those_of_the_model_alone(count):
    """As many as prompts, each its own, on all ranks, however these share them."""
    prompts = [[1, *(3 + (i * 5 + j) % 9 for j in range(i % 4))] for i in range(count)]
    model = af.snapshot_model(create(None))
    alone = [
        model.generate(**padded([p]), **GREEDY)[0, len(p) :].tolist() for p in prompts
    ]
    for size in (1, 2, 3):
        ways = [
            partial(of_a_dataset, prompts),
            partial(of_a_list, prompts, None),
            partial(of_a_list, prompts, af.wrap_fsdp()),
        ]
        for way in ways:
            assert [alone] * size == list(simulate(size, way))
