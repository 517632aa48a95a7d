"""Every recipe, small enough for a test: the arguments that override it."""

from __future__ import annotations

from pathlib import Path

RECIPES = Path(__file__).parents[2] / "recipes"


def hugging_face_model(folder: Path) -> Path:
    """A tiny model with its tokenizer, as ``save_pretrained`` leaves them: bytes for tokens, one more for the end."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*alphabet, "<end>"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(folder)
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = GPT2Config(vocab_size=len(vocabulary), n_positions=16, n_embd=16, n_layer=1, n_head=2, **dropout)
    GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


def toy(recipe: str, text: Path, results: Path, *arguments: str) -> list[str]:
    """Arguments that train a recipe for a few small steps on one CPU and write below ``results``.

    Args:
        recipe: its name.
        text: a folder, for recipes that read one.
        results: a folder.
        arguments: what is added.
    """
    windows = ["--data.path", str(text), "--data.sequence_length", "16", "--data.batch_size", "2"]
    windows += ["--data.validation_fraction", "0.05"]
    small = ["--model.width", "16", "--model.layers", "1", "--model.sequence_length", "16", "--data.num_workers", "0"]
    steps = ["--trainer.max_steps", "3", "--trainer.accumulate_grad_batches", "2", "--trainer.val_check_interval", "6"]
    of_recipe = {
        "gpt2": [*windows, *small, *steps, "--model.heads", "2", "--model.vocabulary_size", "256"],
        "long_context": [
            *(*windows, *small, *steps, "--model.heads", "4", "--model.key_heads", "2", "--trainer.devices", "1"),
            *("--trainer.strategy.context_parallel_size", "1"),
        ],
        "image_classifier": [
            *("--model.width", "4", "--model.blocks", "1", "--data.drawn", "36", "--data.batch_size", "8"),
            *("--data.size", "8", "--data.num_workers", "0", "--trainer.max_epochs", "1"),
        ],
        "fine_tune": [
            *(*windows, "--trainer.max_epochs", "1", "--trainer.limit_train_batches", "4", "--model.learning_rate"),
            *("0.01", "--model.save_to", str(results / "fine_tuned"), "--trainer.limit_val_batches", "2"),
        ],
        "own_module/recipe": ["--trainer.max_epochs", "1", "--data.points", "200", "--model.width", "8"],
    }[recipe]
    return [
        *("--config", str(RECIPES / f"{recipe}.yaml"), *of_recipe, "--trainer.accelerator", "cpu"),
        *("--trainer.log_every_n_steps", "1", "--trainer.default_root_dir", str(results)),
        *("--trainer.logger.save_dir", str(results), *arguments),
    ]
