"""Text written by the trained module, on the terminal when training ends."""

import contextlib
from collections.abc import Callable, Sequence

import rich
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from rich.text import Text
from typing_extensions import override


class SampleText(Callback):
    """Print what a byte-level module makes of some prompts when training ends.

    The module needs a ``generate`` like :meth:`lightning_spmd.examples.GPTBytes.generate`. Every rank generates,
    because the parameters may be sharded over all of them; rank 0 prints. The random numbers are the callback's own,
    so that the run's are left as they were.

    Args:
        prompts: The beginnings; an empty one becomes a newline.
        length: How many bytes to add to each.
        temperature: Divides the scores before sampling; 0 takes the likeliest byte.
        seed: Of the random numbers.

    Raises:
        ValueError: If there is no prompt, or ``length`` or ``temperature`` is negative.
        TypeError: When training starts, if the module has no ``generate``.
    """

    def __init__(
        self, prompts: Sequence[str] = ("def ",), length: int = 200, temperature: float = 0.8, seed: int = 0
    ) -> None:
        super().__init__()
        if isinstance(prompts, str) or not prompts:
            raise ValueError(f"SampleText(prompts={prompts!r}): give a list of at least one string.")
        if length < 0 or temperature < 0:
            raise ValueError(f"SampleText(length={length}, temperature={temperature}): neither may be negative.")
        self.prompts = list(prompts)
        self.length = length
        self.temperature = temperature
        self.seed = seed
        self.samples: list[str] = []
        """What the last training wrote, prompts included."""

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit" and not callable(getattr(pl_module, "generate", None)):
            raise TypeError(
                f"SampleText needs a module with generate(prompt, length, temperature, generator), and "
                f"{type(pl_module).__name__} has none. Take SampleText out of trainer.callbacks, or write the method."
            )

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Not on_fit_end: by then the strategy has moved the module away and closed its process groups.
        generator = torch.Generator().manual_seed(self.seed)
        was_training = pl_module.training
        pl_module.eval()
        try:
            whole = getattr(trainer.strategy, "full_parameters", contextlib.nullcontext)
            with whole():
                self.samples = [self._sample(pl_module, prompt, generator) for prompt in self.prompts]
        finally:
            pl_module.train(was_training)
        if trainer.is_global_zero:
            console = rich.get_console()
            for number, sample in enumerate(self.samples, start=1):
                console.rule(f"sample {number} of {len(self.samples)}", style="dim")
                # As Text, because rich would take brackets in a plain string for its own markup.
                console.print(Text(sample), soft_wrap=True)
            console.rule(style="dim")

    def _sample(self, module: LightningModule, prompt: str, generator: torch.Generator) -> str:
        start = torch.tensor([list(prompt.encode() or b"\n")], device=module.device)
        generate: Callable[..., torch.Tensor] = getattr(module, "generate")  # noqa: B009  (no LightningModule attribute)
        written = generate(start, length=self.length, temperature=self.temperature, generator=generator)
        # A sample may begin or end in the middle of a character, and control bytes would act on the terminal.
        text = bytes(written[0].tolist()).decode(errors="replace")
        return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)
