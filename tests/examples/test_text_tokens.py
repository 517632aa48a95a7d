"""TextTokens: bytes, a tokenizer's tokens, files of tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lightning_spmd.examples import TextTokens
from tests.cli.toys import hugging_face_model


def test_without_a_tokenizer_tokens_are_bytes(text: Path) -> None:
    data = TextTokens(str(text), sequence_length=16)
    assert bytes(data.read()[:9].tolist()) == b"the quick"
    assert data.vocabulary_size == 256


def test_a_tokenizers_tokens_end_each_file(text: Path, tmp_path: Path) -> None:
    (text / "second.txt").write_text("end")
    data = TextTokens(str(text), tokenizer=str(hugging_face_model(tmp_path / "model")), sequence_length=16)
    tokens = data.read()
    assert data.vocabulary_size == 257
    assert data.loaded_tokenizer.decode(tokens[:9]) == "the quick"
    assert data.loaded_tokenizer.decode(tokens[-4:]) == "end<end>"
    assert (tokens == data.loaded_tokenizer.eos_token_id).sum() == 2


def test_tokens_of_a_file_stay_on_disk_and_become_windows(tmp_path: Path) -> None:
    tokens = torch.arange(50_000, 50_257).to(torch.uint16)
    tokens.numpy().tofile(tmp_path / "tokens.bin")
    data = TextTokens(str(tmp_path / "tokens.bin"), sequence_length=8, batch_size=2, validation_fraction=0.25)
    data.setup("fit")
    batch = next(iter(data.val_dataloader()))
    assert batch["inputs"].dtype == torch.int64
    assert batch["inputs"][0].tolist() == list(range(50_193, 50_201))
    assert torch.equal(batch["targets"], batch["inputs"] + 1)
    assert data.vocabulary_size is None


@pytest.mark.parametrize(("content", "words"), [(b"", "has 0 bytes"), (b"abc", "has 3 bytes")])
def test_a_file_of_half_a_token_is_refused(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "tokens.bin").write_bytes(content)
    with pytest.raises(ValueError, match=words):
        TextTokens(str(tmp_path / "tokens.bin")).read()
