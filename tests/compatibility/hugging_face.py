"""Hugging Face's architectures at toy size with random weights, through their own classes and their own losses."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from tests.compatibility.rows import ROWS, STEPS, Made, Row, generator, without_dropout

VOCABULARY, LENGTH, CLASSES = 128, 16, 3
Sample = Callable[[torch.Generator, int], dict[str, Tensor]]
"""Makes the sample with a number."""


class HuggingFace(L.LightningModule):
    """A model that gives its own loss, as most people wrap them."""

    def __init__(self, model: nn.Module, extra: Mapping[str, Any]) -> None:
        super().__init__()
        self.model, self.extra = model, dict(extra)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch, **self.extra).loss
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


# ---------------------------------------------------------------------- samples
def _ids(g: torch.Generator, length: int = LENGTH) -> Tensor:
    return torch.randint(5, VOCABULARY, (length,), generator=g)


def _padded(number: int) -> Tensor:
    """A mask: every third sample is shorter, so that ranks hold different numbers of tokens."""
    mask = torch.ones(LENGTH, dtype=torch.long)
    mask[LENGTH - 5 * (number % 3) :] = 0
    return mask


def _written(g: torch.Generator, number: int) -> dict[str, Tensor]:
    """A text of which the next words are learnt, padded at the end."""
    ids, mask = _ids(g), _padded(number)
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def _unpadded(g: torch.Generator, number: int) -> dict[str, Tensor]:
    ids = _ids(g)
    labels = ids.clone()
    labels[: 5 * (number % 3)] = -100
    return {"input_ids": ids, "labels": labels}


def _masked(g: torch.Generator, number: int) -> dict[str, Tensor]:
    """A text of which some words are learnt."""
    ids, mask = _ids(g), _padded(number)
    learnt = torch.rand(LENGTH, generator=g) < 0.3
    learnt[0] = True
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(~learnt | (mask == 0), -100)}


def _classified(g: torch.Generator, number: int) -> dict[str, Tensor]:
    label = torch.randint(CLASSES, (), generator=g)
    return {"input_ids": _ids(g), "attention_mask": _padded(number), "labels": label}


def _replaced(g: torch.Generator, number: int) -> dict[str, Tensor]:
    """A text of which each word is told whether it was replaced."""
    return {"input_ids": _ids(g), "attention_mask": _padded(number), "labels": torch.randint(2, (LENGTH,), generator=g)}


def _translated(g: torch.Generator, number: int) -> dict[str, Tensor]:
    mask = _padded(number)
    labels = _ids(g, 12)
    labels[12 - 3 * (number % 3) :] = -100
    return {"input_ids": _ids(g), "attention_mask": mask, "labels": labels}


def _picture(g: torch.Generator, _number: int) -> dict[str, Tensor]:
    return {
        "pixel_values": torch.randn(3, 32, 32, generator=g),
        "labels": torch.randint(CLASSES, (), generator=g),
    }


def _segmented(side: int) -> Sample:
    def sample(g: torch.Generator, number: int) -> dict[str, Tensor]:
        labels = torch.randint(CLASSES, (side, side), generator=g)
        labels[: number % 3] = 255  # not labelled
        return {"pixel_values": torch.randn(3, side, side, generator=g), "labels": labels}

    return sample


def _spoken(g: torch.Generator, _number: int) -> dict[str, Tensor]:
    return {"input_values": torch.randn(800, generator=g), "labels": torch.randint(CLASSES, (), generator=g)}


def _transcribed(g: torch.Generator, number: int) -> dict[str, Tensor]:
    labels = torch.randint(5, 20, (6,), generator=g)
    labels[6 - number % 3 :] = -100
    return {"input_values": torch.randn(1600, generator=g), "labels": labels}


def _spectrum(bands: int, frames: int, name: str = "input_values") -> Sample:
    def sample(g: torch.Generator, _number: int) -> dict[str, Tensor]:
        shape = (frames, bands) if name == "input_values" else (bands, frames)
        return {name: torch.randn(shape, generator=g), "labels": torch.randint(CLASSES, (), generator=g)}

    return sample


def _heard(g: torch.Generator, number: int) -> dict[str, Tensor]:
    labels = _ids(g, 12)
    labels[12 - 3 * (number % 3) :] = -100
    return {"input_features": torch.randn(8, 32, generator=g), "labels": labels}


def _described(g: torch.Generator, number: int) -> dict[str, Tensor]:
    """A picture and its text."""
    return {
        "input_ids": _ids(g),
        "attention_mask": _padded(number),
        "pixel_values": torch.randn(3, 32, 32, generator=g),
    }


def _described_and_learnt(g: torch.Generator, number: int) -> dict[str, Tensor]:
    sample = _described(g, number)
    return {**sample, "labels": sample["input_ids"].masked_fill(sample["attention_mask"] == 0, -100)}


def _with_picture_tokens(g: torch.Generator, number: int) -> dict[str, Tensor]:
    """A text that begins with a picture: 16 patches."""
    sample = _described_and_learnt(g, number)
    tokens = torch.full((16,), 3)
    return {
        **sample,
        "input_ids": torch.cat([tokens, sample["input_ids"]]),
        "attention_mask": torch.cat([torch.ones_like(tokens), sample["attention_mask"]]),
        "labels": torch.cat([torch.full_like(tokens, -100), sample["labels"]]),
    }


def _asked(g: torch.Generator, number: int) -> dict[str, Tensor]:
    """A picture and a question, with the answers' scores."""
    return {**_described(g, number), "labels": torch.rand(CLASSES, generator=g)}


# ---------------------------------------------------------------------- the table
_TEXT = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 64, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_GROUPED = {**_TEXT, "num_key_value_heads": 2}
_IMAGE = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "image_size": 32,
    "patch_size": 8,
}  # fmt: skip
_CLASSES = {"num_labels": CLASSES}
_SEQ2SEQ = {
    "vocab_size": VOCABULARY, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2,
}  # fmt: skip
_SPEECH = {
    **_TEXT, "vocab_size": 24, "conv_dim": (16, 16), "conv_stride": (5, 4), "conv_kernel": (10, 8),
    "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4, "num_feat_extract_layers": 2,
    "apply_spec_augment": False, **_CLASSES,
}  # fmt: skip
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_GPT2 = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "pad_token_id": 0}
_SWIN = {"image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4}
_RESNET = {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1]}
_T5 = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4,
       "decoder_start_token_id": 0}  # fmt: skip

Entry = tuple[str, dict[str, Any], Sample]
_TABLE: dict[str, dict[str, Entry]] = {
    "text": {
        "GPT2LMHeadModel": ("GPT2Config", _GPT2, _written),
        "LlamaForCausalLM": ("LlamaConfig", _GROUPED, _written),
        "MistralForCausalLM": ("MistralConfig", {**_GROUPED, "sliding_window": 8}, _written),
        "Qwen2ForCausalLM": ("Qwen2Config", _GROUPED, _written),
        "Qwen3ForCausalLM": ("Qwen3Config", {**_GROUPED, "head_dim": 8}, _written),
        "GemmaForCausalLM": ("GemmaConfig", {**_GROUPED, "head_dim": 8}, _written),
        "Gemma2ForCausalLM": ("Gemma2Config", {**_GROUPED, "head_dim": 8}, _written),
        "PhiForCausalLM": ("PhiConfig", _TEXT, _written),
        "OPTForCausalLM": ("OPTConfig", {**_TEXT, "ffn_dim": 64, "word_embed_proj_dim": 32}, _written),
        "BloomForCausalLM": ("BloomConfig", {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4},
                             _written),
        "GPTNeoXForCausalLM": ("GPTNeoXConfig", _TEXT, _written),
        "GPTJForCausalLM": ("GPTJConfig", {**_GPT2, "rotary_dim": 4}, _written),
        "FalconForCausalLM": ("FalconConfig", _TEXT, _written),
        "StableLmForCausalLM": ("StableLmConfig", _GROUPED, _written),
        "BertForMaskedLM": ("BertConfig", _TEXT, _masked),
        "BertForSequenceClassification": ("BertConfig", {**_TEXT, **_CLASSES}, _classified),
        "RobertaForMaskedLM": ("RobertaConfig", _TEXT, _masked),
        "DistilBertForSequenceClassification": (
            "DistilBertConfig", {"vocab_size": VOCABULARY, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64,
                                 **_CLASSES}, _classified),
        "AlbertForSequenceClassification": ("AlbertConfig", {**_TEXT, "embedding_size": 16, **_CLASSES}, _classified),
        "DebertaV2ForSequenceClassification": (
            "DebertaV2Config", {**_TEXT, **_CLASSES, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
            _classified),
        "ElectraForPreTraining": ("ElectraConfig", {**_TEXT, "embedding_size": 16}, _replaced),
        "LongformerForSequenceClassification": (
            "LongformerConfig", {**_TEXT, **_CLASSES, "attention_window": 4}, _classified),
        "XLNetLMHeadModel": ("XLNetConfig", {"vocab_size": VOCABULARY, "d_model": 32, "n_layer": 2, "n_head": 4,
                                             "d_inner": 64}, _unpadded),
        "ModernBertForMaskedLM": ("ModernBertConfig", {**_TEXT, "cls_token_id": 1, "sep_token_id": 2}, _masked),
    },
    "state space and recurrent": {
        "MambaForCausalLM": ("MambaConfig", {**_TEXT, "state_size": 8}, _unpadded),
        "Mamba2ForCausalLM": (
            "Mamba2Config", {**_TEXT, "state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 8},
            _unpadded),
        "RwkvForCausalLM": ("RwkvConfig", {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2,
                                           "attention_hidden_size": 32, "context_length": 64}, _unpadded),
    },
    "mixture of experts": {
        "MixtralForCausalLM": ("MixtralConfig", {**_GROUPED, "num_local_experts": 4}, _written),
        "Qwen2MoeForCausalLM": (
            "Qwen2MoeConfig", {**_GROUPED, **_EXPERTS, "shared_expert_intermediate_size": 32}, _written),
        "OlmoeForCausalLM": ("OlmoeConfig", {**_GROUPED, **_EXPERTS}, _written),
        "SwitchTransformersForConditionalGeneration": (
            "SwitchTransformersConfig", {**_T5, "num_experts": 4, "num_sparse_encoder_layers": 1,
                                         "num_sparse_decoder_layers": 1, "num_decoder_layers": 2,
                                         "router_jitter_noise": 0.0}, _translated),
    },
    "sequence to sequence": {
        "T5ForConditionalGeneration": ("T5Config", _T5, _translated),
        "BartForConditionalGeneration": ("BartConfig", _SEQ2SEQ, _translated),
        "MarianMTModel": ("MarianConfig", {**_SEQ2SEQ, "decoder_vocab_size": VOCABULARY}, _translated),
        "PegasusForConditionalGeneration": ("PegasusConfig", _SEQ2SEQ, _translated),
        "MBartForConditionalGeneration": ("MBartConfig", _SEQ2SEQ, _translated),
        "WhisperForConditionalGeneration": (
            "WhisperConfig", {**_SEQ2SEQ, "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 32,
                              "begin_suppress_tokens": None, "suppress_tokens": None}, _heard),
    },
    "vision": {
        "ViTForImageClassification": ("ViTConfig", {**_IMAGE, **_CLASSES}, _picture),
        "DeiTForImageClassification": ("DeiTConfig", {**_IMAGE, **_CLASSES}, _picture),
        "Dinov2ForImageClassification": ("Dinov2Config", {**_IMAGE, **_CLASSES}, _picture),
        "SwinForImageClassification": ("SwinConfig", {**_SWIN, **_CLASSES}, _picture),
        "ConvNextForImageClassification": (
            "ConvNextConfig", {"hidden_sizes": [16, 32], "depths": [1, 1], "num_stages": 2, **_CLASSES}, _picture),
        "ResNetForImageClassification": ("ResNetConfig", {**_RESNET, **_CLASSES}, _picture),
        "RegNetForImageClassification": (
            "RegNetConfig", {**_RESNET, "groups_width": 8, **_CLASSES}, _picture),
        "MobileNetV2ForImageClassification": (
            "MobileNetV2Config", {"image_size": 32, "depth_multiplier": 0.25, **_CLASSES}, _picture),
        "SegformerForSemanticSegmentation": (
            "SegformerConfig", {"num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [8, 16],
                                "patch_sizes": [7, 3], "strides": [4, 2], "num_attention_heads": [1, 2],
                                "mlp_ratios": [2, 2], "decoder_hidden_size": 16, **_CLASSES}, _segmented(32)),
    },
    "audio": {
        "Wav2Vec2ForSequenceClassification": ("Wav2Vec2Config", _SPEECH, _spoken),
        "Wav2Vec2ForCTC": ("Wav2Vec2Config", _SPEECH, _transcribed),
        "HubertForSequenceClassification": ("HubertConfig", _SPEECH, _spoken),
        "ASTForAudioClassification": (
            "ASTConfig", {**_IMAGE, "patch_size": 4, "frequency_stride": 4, "time_stride": 4, "max_length": 16,
                          "num_mel_bins": 8, **_CLASSES}, _spectrum(8, 16)),
    },
}  # fmt: skip

_FAST = {"SegformerForSemanticSegmentation"}


def _calm(config: Any) -> Any:
    """A configuration, and those in it, without dropout, dropped layers and dropped paths."""
    for name, value in list(vars(config).items()):
        if "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)
        elif hasattr(value, "to_dict"):
            _calm(value)
    return config


def made(model: nn.Module, sample: Sample, extra: Mapping[str, Any] | None = None) -> Made:
    """A model and its samples."""
    g = generator()
    return HuggingFace(without_dropout(model), extra or {}), [sample(g, i) for i in range(ROWS * STEPS)], None


def _make(architecture: str, configuration: str, settings: Mapping[str, Any], sample: Sample) -> Made:
    import transformers

    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    config = _calm(getattr(transformers, configuration)(**settings))
    return made(getattr(transformers, architecture)(config), sample)


_CHOSEN = "which rows have a label is asked of the whole batch"
_OTHERWISE: dict[str, dict[str, Any]] = {
    "DebertaV2ForSequenceClassification": {"couples": _CHOSEN},
    "ElectraForPreTraining": {"couples": _CHOSEN},
    "LongformerForSequenceClassification": {"couples": "which positions see all others is asked of the whole batch"},
    "SwitchTransformersForConditionalGeneration": {
        "couples": "experts take tokens of all rows together",
        "note": "a graph for each number of tokens that an expert gets",
    },
    "Wav2Vec2ForCTC": {"couples": "labels of all rows are one list without padding"},
    "MobileNetV2ForImageClassification": {
        "flags": (("precision", "64-true"),),
        "note": "in float64: batch norm over four rows and one pixel makes roundings in float32 as large as the loss",
    },
}


def _pair(architecture: str, configuration: str, settings: Mapping[str, Any], sample: Sample, **extra: Any) -> Made:
    """A model of a text and a vision configuration."""
    import transformers

    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    config = _calm(getattr(transformers, configuration)(**settings))
    return made(getattr(transformers, architecture)(config), sample, extra)


_PAIRS = {"text_config": {**_TEXT, "max_position_embeddings": 32}, "vision_config": _IMAGE}
_LLAVA = {
    "text_config": {**_GROUPED, "model_type": "llama"}, "vision_config": {**_IMAGE, "model_type": "clip_vision_model"},
    "image_token_id": 3, "vision_feature_select_strategy": "default", "image_seq_length": 16,
}  # fmt: skip
_CONTRASTIVE = "every picture is compared with every text of the batch"
_MULTIMODAL: dict[str, tuple[str, dict[str, Any], Sample, dict[str, Any], str]] = {
    "CLIPModel": ("CLIPConfig", {**_PAIRS, "projection_dim": 16}, _described, {"return_loss": True}, _CONTRASTIVE),
    "SiglipModel": ("SiglipConfig", _PAIRS, _described, {"return_loss": True}, _CONTRASTIVE),
    "BlipForConditionalGeneration": ("BlipConfig", _PAIRS, _described_and_learnt, {}, ""),
    "LlavaForConditionalGeneration": (
        "LlavaConfig",
        _LLAVA,
        _with_picture_tokens,
        {},
        "patches take the places of picture tokens of all rows, in order",
    ),
    "ViltForQuestionAnswering": (
        "ViltConfig",
        {**_TEXT, **_IMAGE, "num_labels": CLASSES},
        _asked,
        {},
        "patches are picked from all rows together",
    ),
}


def _row(name: str, kind: str, make: Callable[[], Made], couples: str = "") -> Row:
    return Row(name, kind, make, fast=name in _FAST, **{"couples": couples, **_OTHERWISE.get(name, {})})


def rows() -> list[Row]:
    """All of them."""
    single = [
        _row(name, kind, functools.partial(_make, name, *entry))
        for kind, entries in _TABLE.items()
        for name, entry in entries.items()
    ]
    pairs = [
        Row(
            name,
            "multimodal",
            functools.partial(_pair, name, *entry, **extra),
            couples=couples,
            fast=name in _FAST,
            **_OTHERWISE.get(name, {}),
        )
        for name, (*entry, extra, couples) in _MULTIMODAL.items()
    ]
    return single + pairs
