"""The examples of Lightning's own repository that need no download, with random data in place of theirs.

They are in no package: the environment variable ``LIGHTNING_EXAMPLES`` names the folder ``examples/pytorch`` of a copy
of the repository.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from tests.compatibility.rows import FOLDER_OF_EXAMPLES, ROWS, STEPS, Made, Row, generator, without_dropout

COUNT = ROWS * STEPS


def _example(path: str) -> Any:
    file = Path(os.environ[FOLDER_OF_EXAMPLES]) / f"{path}.py"
    spec = importlib.util.spec_from_file_location(f"lightning_example_{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _digits() -> list[Any]:
    g = generator()
    return [(torch.rand(1, 28, 28, generator=g), int(torch.randint(10, (), generator=g))) for _ in range(COUNT)]


def _autoencoder() -> Made:
    return _example("basics/autoencoder").LitAutoEncoder(), _digits(), None


def _classifier() -> Made:
    return _example("basics/backbone_image_classifier").LitClassifier(), _digits(), None


def _language() -> Made:
    g = generator()
    texts = [torch.randint(33, (36,), generator=g) for _ in range(COUNT)]
    model = _example("basics/transformer").LanguageModel(vocab_size=33)
    return without_dropout(model), [(text[:-1], text[1:]) for text in texts], None


def _boring() -> Made:
    g = generator()
    samples = [torch.randn(32, generator=g) for _ in range(COUNT)]
    return _example("bug_report/bug_report_model").BoringModel(), samples, None


def _adversarial() -> Made:
    return _example("domain_templates/generative_adversarial_net").GAN(), _digits(), None


def _imagenet() -> Made:
    g = generator()
    model = _example("domain_templates/imagenet").ImageNetLightningModel("nowhere")
    model.setup = lambda stage: None  # would look for the pictures
    pictures = [(torch.randn(3, 64, 64, generator=g), int(torch.randint(1000, (), generator=g))) for _ in range(COUNT)]
    return model, pictures, None


def _segmentation() -> Made:
    example = _example("domain_templates/semantic_segmentation")
    with mock.patch.object(example, "KITTI"):
        model = example.SegModel("nowhere", features_start=8, num_layers=3)
    model.learning_rate = model.lr  # which the example forgets, and asks for
    g = generator()
    masks = [torch.randint(19, (32, 64), generator=g) for _ in range(COUNT)]
    for number, mask in enumerate(masks):
        mask[: number % 3] = 250  # not labelled
    return model, [(torch.randn(3, 32, 64, generator=g), mask) for mask in masks], None


_ROWS: list[tuple[str, Callable[[], Made], dict[str, Any]]] = [
    ("autoencoder", _autoencoder, {}),
    ("backbone_image_classifier", _classifier, {}),
    ("transformer", _language, {"flags": (("gradient_clip_val", 0.25),)}),
    ("bug_report_model", _boring, {}),
    (
        "generative_adversarial_net",
        _adversarial,
        {
            "draws": "draws the generator's noise, other numbers on each rank",
            "flags": (("max_steps", -1), ("max_epochs", 1)),  # two steps a batch
        },
    ),
    ("imagenet", _imagenet, {"flags": (("precision", "64-true"),), "note": "in float64, for its last batch norm"}),
    ("semantic_segmentation", _segmentation, {}),
]


def rows() -> list[Row]:
    """All of them."""
    return [Row(name, "Lightning's examples", make, needs="lightning", **more) for name, make, more in _ROWS]
