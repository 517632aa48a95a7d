"""Hugging Face architectures at toy size with random weights: name → (model, batch of B rows)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

VOCABULARY, LENGTH = 128, 16


def _ids(rows: int) -> Tensor:
    return torch.randint(5, VOCABULARY, (rows, LENGTH))


def _language(rows: int) -> dict[str, Any]:
    ids = _ids(rows)
    labels = ids.clone()
    labels[0, :11] = -100  # ranks hold different numbers of targets
    return {"input_ids": ids, "labels": labels}


def _classification(rows: int) -> dict[str, Any]:
    mask = torch.ones(rows, LENGTH, dtype=torch.long)
    mask[0, LENGTH // 2 :] = 0
    return {"input_ids": _ids(rows), "attention_mask": mask, "labels": torch.randint(0, 3, (rows,))}


def _image(rows: int) -> dict[str, Any]:
    return {"pixel_values": torch.randn(rows, 3, 32, 32), "labels": torch.randint(0, 3, (rows,))}


def _contrastive(rows: int) -> dict[str, Any]:
    return {"input_ids": _ids(rows), "pixel_values": torch.randn(rows, 3, 32, 32), "return_loss": True}


_DECODER = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 64, "max_position_embeddings": 64,
}  # fmt: skip
_IMAGE = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "image_size": 32,
    "patch_size": 8,
}  # fmt: skip
_GROUPED = {"num_key_value_heads": 2}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}

_CONFIGURATIONS: dict[str, tuple[str, str, dict[str, Any], Callable[[int], dict[str, Any]]]] = {
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4,
             "n_positions": 64, "bos_token_id": 0, "eos_token_id": 0}, _language),
    "llama": ("LlamaConfig", "LlamaForCausalLM", {**_DECODER, **_GROUPED}, _language),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {**_DECODER, **_GROUPED, "head_dim": 8}, _language),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", {**_DECODER, **_GROUPED, "head_dim": 8}, _language),
    "opt": ("OPTConfig", "OPTForCausalLM", {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2,
            "num_attention_heads": 4, "ffn_dim": 64, "max_position_embeddings": 64, "word_embed_proj_dim": 32},
            _language),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", {**_DECODER, **_GROUPED, "num_local_experts": 4}, _language),
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", {**_DECODER, **_GROUPED, **_EXPERTS, "head_dim": 8,
                  "num_experts": 4}, _language),
    "deepseek_v3": ("DeepseekV3Config", "DeepseekV3ForCausalLM", {**_DECODER, **_EXPERTS, "num_key_value_heads": 4,
                    "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 2, "topk_group": 1,
                    "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
                    "qk_nope_head_dim": 8, "v_head_dim": 8}, _language),
    "gpt_oss": ("GptOssConfig", "GptOssForCausalLM", {**_DECODER, **_GROUPED, "head_dim": 8, "num_local_experts": 4,
                "num_experts_per_tok": 2, "sliding_window": 8}, _language),
    "bert_cls": ("BertConfig", "BertForSequenceClassification", {**_DECODER, "num_labels": 3}, _classification),
    "distilbert": ("DistilBertConfig", "DistilBertForSequenceClassification", {"vocab_size": VOCABULARY, "dim": 32,
                   "n_layers": 2, "n_heads": 4, "hidden_dim": 64, "num_labels": 3}, _classification),
    "t5": ("T5Config", "T5ForConditionalGeneration", {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 64,
           "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}, _language),
    "vit": ("ViTConfig", "ViTForImageClassification", {**_IMAGE, "num_labels": 3}, _image),
    "convnext": ("ConvNextConfig", "ConvNextForImageClassification", {"hidden_sizes": [16, 32], "depths": [1, 1],
                 "num_stages": 2, "num_labels": 3}, _image),
}  # fmt: skip

EXPERTS = ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss")
NAMES = [*(name for name in _CONFIGURATIONS if name not in EXPERTS[1:]), "clip"]


def build(name: str, rows: int) -> tuple[torch.nn.Module, dict[str, Any]]:
    """The model in training mode without dropout, and a batch."""
    import transformers

    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    if name == "clip":
        text = {**_DECODER, "num_hidden_layers": 1, "max_position_embeddings": 32, "eos_token_id": 2}
        config = transformers.CLIPConfig(
            text_config=text, vision_config={**_IMAGE, "num_hidden_layers": 1}, projection_dim=16
        )
        model, batch = transformers.CLIPModel(config), _contrastive
    else:
        configuration, architecture, arguments, batch = _CONFIGURATIONS[name]
        model = getattr(transformers, architecture)(getattr(transformers, configuration)(**arguments))
    for part in model.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0
    for part in model.modules():
        for attribute in ("dropout", "attention_dropout", "attn_dropout", "dropout_prob"):
            if isinstance(getattr(part, attribute, None), float):
                setattr(part, attribute, 0.0)
    return model.train(), batch(rows)
