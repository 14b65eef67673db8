"""The models that both `generate.py` and `run.py` compare: small configurations, and what each is given."""

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    ResNetConfig,
    ResNetForImageClassification,
    ViTConfig,
    ViTForImageClassification,
)

TOKENS = [[5, 9, 2, 30, 7, 7, 1, 12, 33], [3, 3, 21, 8, 14, 2, 6, 39, 0]]
# The first text is two tokens shorter, and filled up in front.
PADDED = [[0, 0, 1, 1, 1, 1, 1, 1, 1], [1] * 9]
# Filled up behind.
SHORT = [[1] * 9, [1, 1, 1, 1, 1, 0, 0, 0, 0]]
ENDLESS = dict(bos_token_id=None, eos_token_id=None)
GPT2 = dict(vocab_size=40, n_positions=24, n_embd=16, n_layer=3, n_head=4, **ENDLESS)
LLAMA = dict(
    vocab_size=40, hidden_size=24, intermediate_size=40, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2,
    max_position_embeddings=32, **ENDLESS,
)
LLAMA3 = dict(
    rope_type="llama3", rope_theta=100.0, factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=16,
)
BERT = dict(
    vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32,
    max_position_embeddings=12, num_labels=3,
)
VIT = dict(
    hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32, image_size=12, patch_size=4,
    num_labels=5,
)
RESNET = dict(embedding_size=8, hidden_sizes=[8, 16, 16, 24], depths=[1, 2, 1, 1], num_labels=5)


def cases():
    """Name, model and input by name."""
    text = {"input_ids": torch.tensor(TOKENS)}
    padded, short = ({**text, "attention_mask": torch.tensor(mask)} for mask in (PADDED, SHORT))
    segments = {**short, "token_type_ids": torch.tensor([[0] * 4 + [1] * 5] * 2)}
    gpt2 = lambda **kwargs: GPT2LMHeadModel(GPT2Config(**{**GPT2, **kwargs}))
    llama = lambda **kwargs: LlamaForCausalLM(LlamaConfig(**{**LLAMA, **kwargs}))
    sliding = dict(use_sliding_window=True, sliding_window=3, max_window_layers=1)
    return {
        "bert": (lambda: BertForSequenceClassification(BertConfig(**BERT)), segments),
        "bert_gelu_new": (lambda: BertForSequenceClassification(BertConfig(**BERT, hidden_act="gelu_new")), segments),
        "gpt2": (gpt2, text),
        "gpt2_padded": (gpt2, padded),
        "gpt2_filled_up_behind": (gpt2, short),
        "gpt2_untied": (
            lambda: gpt2(tie_word_embeddings=False, scale_attn_by_inverse_layer_idx=True, n_inner=20, activation_function="relu"),
            text,
        ),
        "gpt2_unscaled": (lambda: gpt2(scale_attn_weights=False), text),
        "llama": (llama, text),
        "llama_padded": (llama, padded),
        "llama_tied": (lambda: llama(tie_word_embeddings=True, num_key_value_heads=6, head_dim=8), text),
        "llama_biases": (lambda: llama(attention_bias=True, mlp_bias=True, hidden_act="gelu"), text),
        "llama_rope_llama3": (lambda: llama(rope_parameters=LLAMA3), text),
        "llama_rope_linear": (
            lambda: llama(rope_parameters=dict(rope_type="linear", factor=2.5, rope_theta=5000.0)), text),
        "mistral": (lambda: MistralForCausalLM(MistralConfig(**LLAMA, head_dim=6, sliding_window=4)), text),
        "mistral_padded": (lambda: MistralForCausalLM(MistralConfig(**LLAMA, sliding_window=4)), padded),
        "mistral_without_window": (lambda: MistralForCausalLM(MistralConfig(**LLAMA, sliding_window=None)), text),
        "qwen2": (lambda: Qwen2ForCausalLM(Qwen2Config(**LLAMA, tie_word_embeddings=True)), text),
        "qwen2_sliding": (lambda: Qwen2ForCausalLM(Qwen2Config(**LLAMA, **sliding)), text),
        "vit": (lambda: ViTForImageClassification(ViTConfig(**VIT)), images(3, 12, 12)),
        "vit_without_biases": (
            lambda: ViTForImageClassification(ViTConfig(**{**VIT, "qkv_bias": False, "patch_size": 6, "num_channels": 1})),
            images(1, 12, 12),
        ),
        "resnet_basic": (
            lambda: ResNetForImageClassification(ResNetConfig(**RESNET, layer_type="basic")), images(3, 40, 36)),
        "resnet_bottleneck": (
            lambda: ResNetForImageClassification(ResNetConfig(**RESNET, layer_type="bottleneck")), images(3, 33, 40)),
        "resnet_downsampled": (
            lambda: ResNetForImageClassification(
                ResNetConfig(**RESNET, downsample_in_first_stage=True, downsample_in_bottleneck=True)),
            images(3, 64, 64),
        ),
    }


def labels_of(inputs):
    """The tokens, but for those that fill up a row, and those that would be told from one that does: what such a one sees is nothing
    that anybody would learn from.
    """
    labels = inputs["input_ids"].clone()
    mask = inputs.get("attention_mask", torch.ones_like(labels)).bool()
    before = torch.cat([mask[:, :1], mask[:, :-1]], dim=1)
    return labels.masked_fill(~(mask & before), -100)


def images(*shape):
    return {"pixel_values": formula([2, *shape], 0.5)}


def formula(shape, phase):
    """Numbers between -1 and 1 that `crates/models/tests/parity.rs` makes alike."""
    count = 1
    for size in shape:
        count *= size
    return (torch.arange(count, dtype=torch.float64) * 0.7 + phase).sin().to(torch.float32).reshape(shape)
