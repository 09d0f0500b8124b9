# SPDX-License-Identifier: Apache-2.0
"""One idea more: a Transformers model, schedule and tokenizer, and `af.run` as the loop.

A small BERT learns to tell Python's help from scikit-learn's descriptions of its data.
"""

import re
from collections import Counter
from functools import partial
from importlib.resources import files
from pydoc_data.topics import topics

import torch
import transformers as tf
from torch import Tensor, nn

import accelfn as af

FOLDER = "bert-of-sentences"  # is not there yet
WIDTHS = {"vocab_size": 2000, "hidden_size": 64, "intermediate_size": 128}
LAYERS = {"num_hidden_layers": 2, "num_attention_heads": 4}
READ = {"padding": True, "truncation": True, "max_length": 40, "return_tensors": "pt"}
ASKED = ("The lambda expression yields a function.", "Measurements of 150 irises.")


def sentences() -> list[str]:
    """Return sentences of the one and of the other, in turn."""
    about = files("sklearn.datasets.descr").iterdir()
    texts = [f.read_text("utf-8") for f in about if f.name.endswith(".rst")]
    cut = [re.split(r"(?<=[.:])\s", "\n".join(t)) for t in (topics.values(), texts)]
    long = [sorted({part for part in each if len(part) > 60}) for each in cut]
    even = [each[:: len(each) // min(map(len, long))] for each in long]
    return [sentence for pair in zip(*even, strict=False) for sentence in pair]


def vocabulary(texts: list[str]) -> dict[str, int]:
    """Number the most frequent words, the same in each process: a trained one never is."""
    words = Counter(
        w for text in texts for w in re.findall(r"\w+|[^\w\s]", text.lower())
    )
    special = "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"
    known = *special, *(word for word, _ in words.most_common(1995))
    return {word: number for number, word in enumerate(known)}


def loss_fn(model: nn.Module, batch: tuple[Tensor, ...]) -> af.Loss:
    """Return the loss, which the model computes, and how many sentences are recognised."""
    said, count = model(*batch[:2], labels=batch[2]), len(batch[2])
    right = (said.logits.argmax(1) == batch[2]).sum()
    return af.Loss(said.loss * count, count, right=right)


def train(world: af.World) -> None:
    """Train on four sentences of five, save, and read what was saved."""
    texts = sentences()
    tokenizer = tf.BertTokenizer(vocab=vocabulary(texts))
    read, number = tokenizer(texts, **READ), torch.arange(len(texts))
    coded = read["input_ids"], read["attention_mask"], number % 2
    tests = af.Data(tuple(t[number % 5 == 4] for t in coded), global_batch_size=64)
    data = af.Data(
        tuple(t[number % 5 < 4] for t in coded), global_batch_size=32, shuffle=True
    )
    config, updates = tf.BertConfig(**WIDTHS, **LAYERS), 5 * data.updates_per_epoch
    warmup = partial(tf.get_scheduler, "cosine", num_warmup_steps=9)
    state = af.TrainState.create(
        model=partial(tf.BertForSequenceClassification, config),
        optimizer=partial(torch.optim.AdamW, lr=0.002),
        schedule=af.schedules.from_torch(partial(warmup, num_training_steps=updates)),
        data=data,
        setup=af.chain(af.shard_data(), af.wrap_ddp()),
        world=world,
    )
    state = af.run(
        state,
        af.make_step(loss_fn),
        until=updates,
        actions={af.epochs(1): lambda state, _: af.evaluate(state, tests, loss_fn)},
        track=lambda numbers, update: af.print_once(world, update, numbers),
    )
    af.save_pretrained(state, FOLDER)
    if world.is_main:
        tokenizer.save_pretrained(FOLDER)
        model = tf.AutoModelForSequenceClassification.from_pretrained(FOLDER)
        asked = tf.AutoTokenizer.from_pretrained(FOLDER)(ASKED, **READ)
        print("Python 0, scikit-learn 1:", model(**asked).logits.argmax(1).tolist())


if __name__ == "__main__":
    tf.utils.logging.disable_progress_bar()
    with af.World.from_env(device="cpu") as world:
        train(world)
