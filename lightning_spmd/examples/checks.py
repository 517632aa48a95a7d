"""What the example models refuse, in the words of a recipe: sizes that are none, and data that does not fit."""

from typing import Any

from lightning.pytorch import LightningModule


def check_sizes(module: LightningModule, dropout: float = 0.0, **sizes: int) -> None:
    """Refuse what is no size; called from ``__init__``.

    Args:
        module: The model.
        dropout: A probability.
        **sizes: Arguments that are whole numbers of at least 1, by name.

    Raises:
        ValueError: If one of them is not, or ``dropout`` is no probability.
    """
    for name, size in sizes.items():
        if not isinstance(size, int) or size < 1:  # null is taken for any number by the command line
            raise ValueError(f"{type(module).__name__}({name}={size}): give a whole number of at least 1.")
    if not 0 <= dropout < 1:
        raise ValueError(f"{type(module).__name__}(dropout={dropout}): give a probability of at least 0 and below 1.")


def check_tokens(module: LightningModule, sequence_length: int | None, vocabulary_size: int) -> None:
    """Compare what a language model takes with what the data gives; called from ``setup``.

    Args:
        module: The model, attached to its trainer.
        sequence_length: Its longest input; None where it takes any.
        vocabulary_size: Its number of tokens.

    Raises:
        ValueError: If the data's sequences are longer, or its tokens more.
    """
    data: Any = getattr(module.trainer, "datamodule", None)
    given = getattr(data, "sequence_length", None)
    if given is not None and sequence_length is not None and given > sequence_length:
        raise ValueError(
            f"data.sequence_length={given} is more than {sequence_length}, the longest input of "
            f"{type(module).__name__} (model.sequence_length). Raise the one or lower the other."
        )
    tokens = getattr(data, "vocabulary_size", None)
    if tokens is not None and tokens > vocabulary_size:
        raise ValueError(
            f"the data has {tokens} different tokens, and {type(module).__name__} knows {vocabulary_size} "
            f"(model.vocabulary_size). Raise it to {tokens}, or take another tokenizer."
        )
