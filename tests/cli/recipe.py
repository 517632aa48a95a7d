"""The README's recipe, small enough for a test: arguments that override it."""

from pathlib import Path

RECIPE = str(Path(__file__).parents[2] / "recipes" / "gpt_bytes.yaml")


def tiny(text: Path, results: Path, *arguments: str) -> list[str]:
    """Arguments that train the recipe's model for four steps on ``text`` and write below ``results``."""
    return [
        *("--config", RECIPE, "--data.path", str(text), "--data.batch_size", "2", "--data.sequence_length", "16"),
        *("--model.width", "16", "--model.heads", "2", "--model.layers", "1", "--model.sequence_length", "16"),
        *("--trainer.accelerator", "cpu", "--trainer.max_epochs", "1", "--trainer.limit_train_batches", "4"),
        *("--trainer.limit_val_batches", "2", "--trainer.default_root_dir", str(results)),
        *("--trainer.logger.save_dir", str(results), *arguments),
    ]
