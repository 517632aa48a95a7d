"""Text as tokens of a tokenizer's vocabulary: a LightningDataModule."""

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_spmd.examples.hugging_face import from_folder
from lightning_spmd.examples.text_bytes import TextBytes, read_files

BYTES_OF_A_TOKEN = 2
"""In a file of tokens, which are unsigned: 65,536 different ones."""


class TextTokens(TextBytes):
    """Text as training and validation windows of tokens.

    Batches are dicts ``{"inputs", "targets"}`` of int64 ``[batch_size, sequence_length]``, the targets one token ahead.
    The last ``validation_fraction`` of the tokens is for validation (and test and predict), the rest for training.

    Nothing is downloaded. Without a ``tokenizer`` the tokens are the text's bytes, 256 different ones. GPT-2's own
    tokens need its tokenizer in a folder (``vocab.json`` and ``merges.txt``, or ``tokenizer.json``) and
    ``pip install 'lightning-spmd[hugging-face]'``.

    Args:
        path: A folder of text, one file of text, or by default Python's standard library, as for
            :class:`~lightning_spmd.examples.TextBytes`; or a file ``*.bin`` of tokens that were made before, as
            unsigned 16-bit integers one after the other. That file is not read into memory: it may be of any size.
        tokenizer: A folder that ``transformers.AutoTokenizer`` reads. None takes bytes.
        sequence_length: Tokens in a window.
        batch_size: Windows per batch and *per device*: ``N`` devices train on ``N * batch_size`` windows a step.
        num_workers: Processes that load batches; 0 loads in the training process.
        validation_fraction: Share of the tokens kept for validation, between 0 and 1.

    Raises:
        ValueError: If an argument is out of range; at ``setup``, if there is too little text for one window.
        FileNotFoundError: At ``setup``, if ``path`` or ``tokenizer`` does not exist.
        ModuleNotFoundError: At ``setup``, if there is a ``tokenizer`` and transformers is not installed.
    """

    unit = "tokens"

    def __init__(
        self,
        path: str | None = None,
        tokenizer: str | None = None,
        sequence_length: int = 1024,
        batch_size: int = 16,
        num_workers: int = 0,
        validation_fraction: float = 0.05,
    ) -> None:
        super().__init__(path, sequence_length, batch_size, num_workers, validation_fraction)
        self.tokenizer = tokenizer
        self.vocabulary_size: int | None = None
        """Number of different tokens; None before ``setup``, and where the tokens are a file's."""
        self.loaded_tokenizer: Any = None
        """The tokenizer; None before ``setup``, and where there is none."""

    @override
    def read(self) -> Tensor:
        """All tokens in one row."""
        if self.path is not None and self.path.endswith(".bin"):
            return tokens_of_file(self.path)
        if self.tokenizer is None:
            self.vocabulary_size = 256
            return super().read()
        tokenizer = self.loaded_tokenizer = from_folder(
            "AutoTokenizer", self.tokenizer, "--data.tokenizer", "tokenizer"
        )
        self.vocabulary_size = len(tokenizer)
        texts = [content.decode(errors="replace") for content in read_files(self.path)]
        rows = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        between = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        return torch.tensor([token for row in rows for token in (*row, *between)], dtype=torch.int32)


def tokens_of_file(path: str) -> Tensor:
    """The tokens of a file, uint16 ``[tokens]``, which stay on disk until they are read.

    Args:
        path: The file.

    Raises:
        FileNotFoundError: If it does not exist.
        ValueError: If it does not hold whole tokens, or none.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise FileNotFoundError(
            f"--data.path={path!r} does not exist (seen from {os.getcwd()}). Give a file of tokens."
        )
    size = file.stat().st_size
    if size == 0 or size % BYTES_OF_A_TOKEN:
        raise ValueError(
            f"--data.path={path!r} has {size} bytes: a file of tokens holds at least one, of {BYTES_OF_A_TOKEN} bytes "
            "each."
        )
    return torch.from_file(str(file), size=size // BYTES_OF_A_TOKEN, dtype=torch.uint16)
