"""A complete training job in ordinary Lightning code, for the README, the recipes and the tests.

    text_bytes.TextBytes            files → windows of bytes
      → gpt_bytes.GPTBytes          windows → loss, bits per byte
      → sample_text.SampleText      trained module → text on the terminal
    progress.SPMDProgressBar        what the trainer is doing, building the graph included

Nothing here knows about parallelism: ``GPTBytes`` and ``TextBytes`` run unchanged under ``strategy="auto"`` and
``strategy="ddp"``.
"""

from lightning_spmd.examples.gpt_bytes import GPTBytes
from lightning_spmd.examples.progress import SPMDProgressBar
from lightning_spmd.examples.sample_text import SampleText
from lightning_spmd.examples.text_bytes import TextBytes

__all__ = ["GPTBytes", "SPMDProgressBar", "SampleText", "TextBytes"]
