"""``loss_chunks`` finds the loss of Hugging Face's language models, causal and masked, as they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.tiny_capture import capture_module
from tests.stages.expand.test_row_chunks import sides

transformers = pytest.importorskip("transformers")

CLASSES = 503
_SIZES: dict[str, Any] = {
    "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32,
    "max_position_embeddings": 64,
}  # fmt: skip
_GROUPED = {**_SIZES, "num_key_value_heads": 2}
_STILL = {**_SIZES, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_OF_GPT2 = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64, "resid_pdrop": 0, "embd_pdrop": 0}
_OF_OPT = {
    "hidden_size": 16, "word_embed_proj_dim": 16, "num_hidden_layers": 1, "ffn_dim": 32, "num_attention_heads": 2,
    "max_position_embeddings": 64, "dropout": 0.0,
}  # fmt: skip
_OF_T5 = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0}
MODELS: dict[str, dict[str, Any]] = {
    "GPT2LMHeadModel": {**_OF_GPT2, "attn_pdrop": 0},
    "LlamaForCausalLM": _GROUPED,
    "MistralForCausalLM": _GROUPED,
    "Qwen2ForCausalLM": _GROUPED,
    "Qwen3ForCausalLM": {**_GROUPED, "head_dim": 8},
    "Gemma2ForCausalLM": {**_GROUPED, "head_dim": 8},
    "PhiForCausalLM": _SIZES,
    "Phi3ForCausalLM": {**_GROUPED, "pad_token_id": 0},
    "OPTForCausalLM": _OF_OPT,
    "GPTNeoXForCausalLM": _SIZES,
    "BloomForCausalLM": {"hidden_size": 16, "n_layer": 1, "n_head": 2},
    "Olmo2ForCausalLM": _GROUPED,
    "CohereForCausalLM": _GROUPED,
    "GraniteForCausalLM": _GROUPED,
    "BertForMaskedLM": _STILL,
    "RobertaForMaskedLM": _STILL,
    "AlbertForMaskedLM": {**_SIZES, "embedding_size": 16},
    "ElectraForMaskedLM": {**_STILL, "embedding_size": 16},
    "T5ForConditionalGeneration": {**_OF_T5, "dropout_rate": 0.0},
}


def _loss(module: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    return module(input_ids=tokens, labels=labels).loss


@pytest.mark.parametrize("name", MODELS)
def test_the_loss_is_found(name: str) -> None:
    if not hasattr(transformers, name):
        pytest.skip(f"this version of transformers has no {name}")
    torch.manual_seed(0)
    kind = getattr(transformers, name)
    module = kind(kind.config_class(vocab_size=CLASSES, **MODELS[name])).float()
    tokens = torch.randint(5, CLASSES, (4, 12))
    made = capture_module(module, _loss, [tokens, tokens.where(tokens % 5 > 0, -100)])
    assert "is computed in 4 chunks" in sides(made)[2]
