"""LightningModules of packages on PyPI, one a field, as their documentation makes them; small, with random data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.compatibility.rows import ROWS, STEPS, Made, Row, generator, without_dropout

COUNT = ROWS * STEPS


def forecasting(name: str, settings: dict[str, Any]) -> Made:
    """Time series: 20 windows of a table of three series."""
    import numpy
    import pandas
    import pytorch_forecasting as forecasting

    torch.manual_seed(0)
    random = numpy.random.RandomState(1)
    frames = [
        pandas.DataFrame({"time": range(40), "value": random.rand(40).cumsum() + 1, "series": str(number)})
        for number in range(3)
    ]
    data = forecasting.TimeSeriesDataSet(
        pandas.concat(frames, ignore_index=True),
        time_idx="time",
        target="value",
        group_ids=["series"],
        max_encoder_length=8,
        max_prediction_length=4,
        time_varying_unknown_reals=["value"],
        **({"static_categoricals": ["series"], "time_varying_known_reals": ["time"]} if "Fusion" in name else {}),
    )
    model: Any = getattr(forecasting, name).from_dataset(data, learning_rate=1e-3, **settings)
    return without_dropout(model), [data[i] for i in range(COUNT)], data._collate_fn


def _molecules() -> Made:
    """Message passing over molecules' graphs."""
    from chemprop import data, models, nn

    torch.manual_seed(0)
    chains = ["C" * length + tail for length in range(1, 6) for tail in ("O", "N", "Cl", "C=O")]
    points = [data.MoleculeDatapoint.from_smi(text, y=[float(i)]) for i, text in enumerate(chains)]
    model = models.MPNN(nn.BondMessagePassing(d_h=16), nn.MeanAggregation(), nn.RegressionFFN(input_dim=16))
    samples = data.MoleculeDataset(points)
    return without_dropout(model), [samples[i] for i in range(COUNT)], data.collate_batch


def _cells() -> Made:
    """A variational autoencoder of counts in single cells; its noise, like dropout, is off."""
    import anndata
    import numpy
    import scvi
    from scvi.nn import _base_components as components

    class Mean(torch.distributions.Normal):
        def rsample(self, sample_shape: Any = ()) -> torch.Tensor:
            return self.loc

    components.Normal = Mean  # type: ignore[misc]
    torch.manual_seed(0)
    counts = numpy.random.RandomState(1).poisson(2.0, (COUNT, 30)).astype("float32")
    cells = anndata.AnnData(counts, obs={"batch": numpy.arange(COUNT) % 2})
    scvi.model.SCVI.setup_anndata(cells, batch_key="batch")
    model = scvi.model.SCVI(cells, n_hidden=16, n_latent=4, dropout_rate=0.0)
    plan = scvi.train.TrainingPlan(model.module)
    loader = scvi.dataloaders.AnnDataLoader(model.adata_manager, batch_size=1, shuffle=False)
    samples = [{k: v[0] for k, v in batch.items()} for batch in loader]
    return plan, samples, None


def _segmentation() -> Made:
    """A U-Net with the loss and the statistics of the package's own example."""
    import lightning as L
    import segmentation_models_pytorch as smp

    class Pets(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = smp.Unet("resnet18", encoder_weights=None, encoder_depth=3, decoder_channels=(16, 8, 8))
            self.loss = smp.losses.DiceLoss(smp.losses.BINARY_MODE, from_logits=True)
            self.outputs: list[dict[str, torch.Tensor]] = []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            image, mask = batch
            scores = self.model(image)
            loss = self.loss(scores, mask)
            tp, fp, fn, tn = smp.metrics.get_stats((scores.sigmoid() > 0.5).long(), mask.long(), mode="binary")
            self.outputs.append({"loss": loss, "tp": tp, "fp": fp, "fn": fn, "tn": tn})
            return loss

        def on_train_epoch_end(self) -> None:
            totals = [torch.cat([output[name] for output in self.outputs]) for name in ("tp", "fp", "fn", "tn")]
            self.log("iou", smp.metrics.iou_score(*totals, reduction="micro"))
            self.outputs.clear()

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=1e-3)

    torch.manual_seed(0)
    g = generator()
    samples = [
        (torch.randn(3, 32, 32, generator=g), (torch.rand(1, 32, 32, generator=g) > 0.5).float()) for _ in range(COUNT)
    ]
    return Pets(), samples, None


def _earth() -> Made:
    """The package's own task: land cover of satellite pictures."""
    from torchgeo.trainers import SemanticSegmentationTask

    torch.manual_seed(0)
    model = SemanticSegmentationTask(
        model="unet",
        backbone="resnet18",
        weights=None,
        in_channels=4,
        task="multiclass",
        num_classes=5,
        loss="ce",
        lr=1e-3,
    )
    g = generator()
    samples = [
        {"image": torch.randn(4, 64, 64, generator=g), "mask": torch.randint(5, (64, 64), generator=g)}
        for _ in range(COUNT + ROWS)  # no epoch ends: there its scheduler would ask for a validation
    ]
    return without_dropout(model), samples, None


def _anomalies() -> Made:
    """A normalizing flow over an encoder's features."""
    from anomalib.data import ImageBatch
    from anomalib.models import Fastflow

    torch.manual_seed(0)
    model = Fastflow(backbone="resnet18", pre_trained=False, flow_steps=2, evaluator=False, visualizer=False)
    g = generator()
    pictures = [torch.randn(3, 256, 256, generator=g) for _ in range(COUNT)]
    return model, pictures, lambda chosen: ImageBatch(image=torch.stack(chosen))


_HOOK = "a hook looks at gradients: a graph up to there and one for the update"
_ROWS: list[tuple[str, str, str, Callable[[], Made], dict[str, Any]]] = [
    ("TemporalFusionTransformer", "pytorch_forecasting", "time series",
     lambda: forecasting("TemporalFusionTransformer", {"hidden_size": 8, "attention_head_size": 2}),
     {"note": _HOOK}),
    ("NBeats", "pytorch_forecasting", "time series",
     lambda: forecasting("NBeats", {"widths": [16, 16], "num_blocks": [1, 1], "backcast_loss_ratio": 0.1}),
     {"note": _HOOK}),
    ("MPNN", "chemprop", "molecules", _molecules, {}),
    ("SCVI", "scvi", "cells", _cells, {}),
    ("Unet", "segmentation_models_pytorch", "segmentation", _segmentation,
     {"couples": "the Dice loss adds up areas over the batch",
      "flags": (("precision", "64-true"),), "note": "in float64, for its last batch norm"}),
    ("SemanticSegmentationTask", "torchgeo", "satellite pictures", _earth,
     {"flags": (("precision", "64-true"),), "note": "in float64, for its last batch norm"}),
    ("Fastflow", "anomalib", "anomalies", _anomalies, {"eager": "its batches are of torchvision's class Image"}),
]  # fmt: skip


def rows() -> list[Row]:
    """All of them."""
    from tests.compatibility.fields import MORE  # which uses what is here

    return [
        Row(
            f"{needs}.{name}",
            "packages",
            make,
            needs=needs,
            **{**more, "note": ", ".join(part for part in (field, more.get("note", "")) if part)},
        )
        for name, needs, field, make, more in [*_ROWS, *MORE]
    ]
