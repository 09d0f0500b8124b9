# SPDX-License-Identifier: Apache-2.0
"""Small Transformers models with random weights, created from configurations."""

import torch

DECODER = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
GPT2 = {"vocab_size": 32, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 64}
BERT = {k: v for k, v in DECODER.items() if k != "num_key_value_heads"}
T5 = {"vocab_size": 32, "d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 2}
VIT = {
    k: v for k, v in BERT.items() if k not in {"vocab_size", "max_position_embeddings"}
}
REAL = {
    "LlamaForCausalLM": ("LlamaConfig", DECODER),
    "MistralForCausalLM": ("MistralConfig", DECODER),
    "Qwen2ForCausalLM": ("Qwen2Config", {**DECODER, "tie_word_embeddings": True}),
    "PhiForCausalLM": ("PhiConfig", DECODER),
    "GemmaForCausalLM": ("GemmaConfig", {**DECODER, "head_dim": 4}),
    "GPT2LMHeadModel": ("GPT2Config", GPT2),
    "BertForMaskedLM": ("BertConfig", BERT),
    "T5ForConditionalGeneration": ("T5Config", {**T5, "num_heads": 4}),
    "MixtralForCausalLM": ("MixtralConfig", {**DECODER, "num_local_experts": 4}),
    "ViTForImageClassification": (
        "ViTConfig",
        {**VIT, "image_size": 8, "patch_size": 4},
    ),
}
"""What are built of which configurations."""


def real(name):
    """Return what makes a small model of Transformers, and an input for it."""
    import transformers

    config_name, options = REAL[name]
    config = getattr(transformers, config_name)(**options)
    ids = torch.arange(10).reshape(2, 5)
    inputs = {"input_ids": ids}
    if name.startswith("T5"):
        inputs["decoder_input_ids"] = ids[:, :3]
    if name.startswith("ViT"):
        inputs = {"pixel_values": torch.linspace(-1, 1, 192).reshape(1, 3, 8, 8)}
    return lambda: getattr(transformers, name)(config).eval(), inputs
