"""Fine-tuning of a causal language model of Hugging Face, from a local folder and back into one."""

import contextlib
from typing import Any

from torch import Tensor
from typing_extensions import override

from lightning_spmd.examples.checks import check_tokens
from lightning_spmd.examples.hugging_face import from_folder
from lightning_spmd.examples.language_model import LanguageModel


class FineTunedLM(LanguageModel):
    """Any causal language model that ``transformers`` reads from a folder, trained on.

    Logs ``train_loss`` and ``val_loss`` (nats per token). Batches are dicts ``{"inputs", "targets"}`` of int64
    ``[batch, length]``, the targets one token ahead, as :class:`~lightning_spmd.examples.TextTokens` gives them. Needs
    ``pip install 'lightning-spmd[hugging-face]'``; nothing is downloaded.

    Args:
        path: The folder, as ``save_pretrained`` or a clone of a model's repository writes it.
        save_to: A folder that receives the trained model in the same form when training ends; None saves none.
        frozen: Parts of the model that keep their weights: beginnings of names of parameters.
        learning_rate: The highest learning rate, reached when warmup ends.
        weight_decay: AdamW's decay of matrices and embeddings; biases and norms are not decayed.
        warmup_steps: Optimizer steps over which the learning rate rises from near zero.

    Raises:
        ModuleNotFoundError: If transformers is not installed.
        FileNotFoundError: If ``path`` is no folder.
        ValueError: If ``path`` holds no causal language model, or nothing begins with one of ``frozen``; at ``setup``,
            if the data's sequences or vocabulary are larger than the model's.
    """

    def __init__(
        self,
        path: str,
        save_to: str | None = None,
        frozen: list[str] | None = None,
        learning_rate: float = 5e-5,
        weight_decay: float = 0.01,
        warmup_steps: int = 10,
    ) -> None:
        super().__init__(learning_rate, weight_decay, warmup_steps, final_learning_rate_fraction=0.0)
        self.save_hyperparameters()
        self.save_to = save_to
        self.model: Any = from_folder("AutoModelForCausalLM", path, "model.path", "causal language model")
        # The cache of keys is for generating; while training it would only be carried along.
        self.model.config.use_cache = False
        # Dropout on, as it is in training; from_pretrained switches it off.
        self.model.train()
        names = [name for name, _ in self.model.named_parameters()]
        for start in frozen or []:
            if not any(name.startswith(start) for name in names):
                raise ValueError(
                    f"model.frozen: no parameter of the model begins with {start!r}. The first ones are "
                    f"{', '.join(names[:5])}."
                )
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad = not name.startswith(tuple(frozen or []))

    @override
    def setup(self, stage: str) -> None:
        config = self.model.config
        positions = getattr(config, "max_position_embeddings", None)
        check_tokens(self, positions, config.vocab_size)

    @override
    def forward(self, tokens: Tensor) -> Tensor:
        """Score the next token at every position: int64 ``[batch, length]`` → ``[batch, length, vocabulary]``."""
        return self.model(input_ids=tokens).logits

    @override
    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log_mean("val_loss", self.loss(batch), batch)

    @override
    def on_train_end(self) -> None:
        if self.save_to is None:
            return
        # Every rank, because the parameters may be sharded; they are whole inside, and rank 0 writes.
        whole = getattr(self.trainer.strategy, "full_parameters", contextlib.nullcontext)
        with whole():
            if self.trainer.is_global_zero:
                self.model.save_pretrained(self.save_to)
                # A tokenizer belongs to its model, and who uses the new folder looks for it there.
                tokenizer = getattr(getattr(self.trainer, "datamodule", None), "loaded_tokenizer", None)
                if tokenizer is not None:
                    tokenizer.save_pretrained(self.save_to)
