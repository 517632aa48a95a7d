"""Complete training jobs in ordinary Lightning code, for the README, the recipes and the tests.

    text_bytes.TextBytes            files → windows of bytes
      → gpt_bytes.GPTBytes          windows → loss, bits per byte
      → mixture_bytes.MixtureBytes  the same with experts
      → sample_text.SampleText      trained module → text on the terminal
      → long_context.LongContextLM  the same for windows of tens of thousands of bytes
    text_tokens.TextTokens          files → windows of a tokenizer's tokens
      → gpt2.GPT2                   GPT-2 from scratch
      → fine_tuning.FineTunedLM     a model of Hugging Face, from its folder and back into one
    images.Images                   folders of images, or drawn shapes → augmented images
      → image_classifier.ImageClassifier
    checks                          what the models refuse
    hugging_face                    models and tokenizers from local folders
    language_model                  the loss, the training step and the first weights that the language models share
    optimization                    their optimizer and schedule
    progress.SPMDProgressBar        what the trainer is doing, building the graph included

Nothing here knows about parallelism: the modules and data run unchanged under ``strategy="auto"`` and
``strategy="ddp"``.
"""

from lightning_spmd.examples.fine_tuning import FineTunedLM
from lightning_spmd.examples.gpt2 import GPT2
from lightning_spmd.examples.gpt_bytes import GPTBytes
from lightning_spmd.examples.image_classifier import ImageClassifier
from lightning_spmd.examples.images import Images
from lightning_spmd.examples.long_context import LongContextLM
from lightning_spmd.examples.mixture_bytes import MixtureBytes
from lightning_spmd.examples.progress import SPMDProgressBar
from lightning_spmd.examples.sample_text import SampleText
from lightning_spmd.examples.text_bytes import TextBytes
from lightning_spmd.examples.text_tokens import TextTokens

__all__ = [
    "GPT2",
    "FineTunedLM",
    "GPTBytes",
    "ImageClassifier",
    "Images",
    "LongContextLM",
    "MixtureBytes",
    "SPMDProgressBar",
    "SampleText",
    "TextBytes",
    "TextTokens",
]
