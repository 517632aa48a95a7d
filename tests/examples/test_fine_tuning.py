"""A model of Hugging Face: from its folder, through a training with parameters in parts, back into a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from transformers import AutoModelForCausalLM, AutoTokenizer

import lightning_spmd  # noqa: F401  (registers the strategies)
from lightning_spmd.examples import FineTunedLM, TextTokens
from tests.cli.toys import hugging_face_model
from tests.helpers.ranks import RankPool

ROWS = 4
"""Of a step, on all ranks together."""


class InOrder(TextTokens):
    """Windows in the order of the text, so that one device and several see the same batches."""

    def train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        kept = None
        if self.trainer.world_size > 1:
            kept = DistributedSampler(self._train, shuffle=False, **self.trainer.strategy.distributed_sampler_kwargs)
        return DataLoader(self._train, self.batch_size, sampler=kept)


def fine_tune(model: str, text: str, save_to: str, strategy: str, devices: int, **arguments: Any) -> None:
    """Three steps."""
    torch.manual_seed(1)
    module = FineTunedLM(model, save_to=save_to, learning_rate=0.01, warmup_steps=1, **arguments)
    data = InOrder(text, tokenizer=model, sequence_length=16, batch_size=ROWS // devices)
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "use_distributed_sampler": False}
    trainer = L.Trainer(
        strategy=strategy, accelerator="cpu", devices=devices, max_steps=3, limit_val_batches=1, gradient_clip_val=1.0,
        num_sanity_val_steps=0, enable_model_summary=False, enable_progress_bar=False, **quiet,
    )  # fmt: skip
    trainer.fit(module, data)


def weights(folder: Path) -> dict[str, Tensor]:
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    return hugging_face_model(tmp_path / "model")


def test_two_ranks_with_parameters_in_parts_save_what_one_device_saves(
    model: Path, text: Path, tmp_path: Path, two_ranks: RankPool
) -> None:
    fine_tune(str(model), str(text), str(tmp_path / "one"), "auto", 1)
    two_ranks.run(fine_tune, str(model), str(text), str(tmp_path / "two"), "spmd_zero3", 2)
    one, two, before = (weights(folder) for folder in (tmp_path / "one", tmp_path / "two", model))
    assert one.keys() == two.keys() == before.keys()
    for name, wanted in one.items():
        # Biases of keys change no score: their gradients are rounding, which Adam makes steps of.
        allowed = 1e-3 if name.endswith("c_attn.bias") else 5e-6
        torch.testing.assert_close(two[name], wanted, rtol=1e-5, atol=allowed)
        assert not torch.equal(wanted, before[name]), name
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "two")
    assert tokenizer.decode(tokenizer("lazy dog")["input_ids"]) == "lazy dog"


def test_what_is_frozen_keeps_its_weights(model: Path, text: Path, tmp_path: Path) -> None:
    fine_tune(
        str(model), str(text), str(tmp_path / "saved"), "spmd", 1, frozen=["transformer.h.0.mlp", "transformer.wpe"]
    )
    before, after = weights(model), weights(tmp_path / "saved")
    for name, value in after.items():
        frozen = name.startswith(("transformer.h.0.mlp", "transformer.wpe"))
        assert torch.equal(value, before[name]) == frozen, name
