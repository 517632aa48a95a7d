"""More LightningModules of packages on PyPI, several of a field; small, with random data in their own batches."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.compatibility.packages import COUNT, forecasting
from tests.compatibility.rows import ROWS, Made, generator, without_dropout


def _pictures(size: int = 32, channels: int = 3, count: int = COUNT) -> list[Tensor]:
    g = generator()
    return [torch.randn(channels, size, size, generator=g) for _ in range(count)]


def _table(targets: Callable[[Tensor], Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Rows of six numbers, with a target of their sum."""
    x = torch.randn(COUNT, 6, generator=generator())
    return [(row, targets(row.sum())) for row in x]


def _network(out: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, out))


# ---------------------------------------------------------------------- self-supervised vision
class _TwoViews(L.LightningModule):
    """As the package's documentation makes its models: a backbone and heads, on two views of each picture."""

    def __init__(self, kind: str) -> None:
        from lightly import loss
        from lightly.models import modules

        super().__init__()
        self.kind = kind
        convolutions = nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
        self.backbone = nn.Sequential(convolutions, nn.Flatten())
        sizes = {"input_dim": 8, "hidden_dim": 16, "output_dim": 8}
        heads = {"BYOL": modules.BYOLProjectionHead, "SimSiam": modules.SimSiamProjectionHead,
                 "MoCo": modules.MoCoProjectionHead, "BarlowTwins": modules.BarlowTwinsProjectionHead,
                 "VICReg": modules.heads.VICRegProjectionHead, "NNCLR": modules.NNCLRProjectionHead,
                 "DINO": modules.DINOProjectionHead, "SwAV": modules.SwaVProjectionHead}  # fmt: skip
        head: Any = heads.get(kind, modules.SimCLRProjectionHead)
        if kind == "DINO":
            self.head = head(8, 16, 8, 16, freeze_last_layer=1)
        else:
            self.head = head(**sizes)
        if kind in ("BYOL", "SimSiam", "NNCLR"):
            predictor = {"BYOL": modules.BYOLPredictionHead, "SimSiam": modules.SimSiamPredictionHead,
                         "NNCLR": modules.NNCLRPredictionHead}[kind]  # fmt: skip
            self.predictor = predictor(8, 16, 8)
        if kind in ("BYOL", "MoCo", "DINO"):
            import copy

            from lightly.models.utils import deactivate_requires_grad

            self.teacher = copy.deepcopy(self.backbone)  # and weight norm has no copy
            self.teacher_head = modules.DINOProjectionHead(8, 16, 8, 16) if kind == "DINO" else copy.deepcopy(self.head)
            deactivate_requires_grad(self.teacher)
            deactivate_requires_grad(self.teacher_head)
        if kind == "NNCLR":
            self.bank = modules.NNMemoryBankModule(size=(32, 8))
        if kind == "SwAV":
            self.prototypes = modules.SwaVPrototypes(8, n_prototypes=16)
        losses: dict[str, Callable[[], Any]] = {
            "SimCLR": loss.NTXentLoss, "NNCLR": loss.NTXentLoss, "BYOL": loss.NegativeCosineSimilarity,
            "SimSiam": loss.NegativeCosineSimilarity, "MoCo": lambda: loss.NTXentLoss(memory_bank_size=(32, 8)),
            "BarlowTwins": loss.BarlowTwinsLoss, "VICReg": loss.VICRegLoss, "SwAV": loss.SwaVLoss,
            "DINO": lambda: loss.DINOLoss(output_dim=16, warmup_teacher_temp_epochs=2),
        }  # fmt: skip
        self.criterion = losses[kind]()

    def _embedded(self, view: Tensor) -> Tensor:
        return self.head(self.backbone(view))

    def _taught(self, view: Tensor) -> Tensor:
        with torch.no_grad():
            return self.teacher_head(self.teacher(view))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        from lightly.models.utils import update_momentum
        from lightly.utils.scheduler import cosine_schedule

        if self.kind in ("BYOL", "MoCo", "DINO"):
            momentum = cosine_schedule(batch_idx, 10, 0.996, 1)
            update_momentum(self.backbone, self.teacher, m=momentum)
            update_momentum(self.head, self.teacher_head, m=momentum)
        first, second = batch[0]
        if self.kind == "SwAV":
            self.prototypes.normalize()
            scores = [self.prototypes(F.normalize(self._embedded(v), dim=1, p=2)) for v in (first, second)]
            loss = self.criterion(scores, [])
        elif self.kind == "DINO":
            teachers = [self._taught(v) for v in (first, second)]
            loss = self.criterion(teachers, [self._embedded(v) for v in (first, second)], epoch=self.current_epoch)
        elif self.kind == "MoCo":
            loss = self.criterion(self._embedded(first), self._taught(second))
        elif self.kind == "BYOL":
            a, b = (self.predictor(self._embedded(v)) for v in (first, second))
            loss = 0.5 * (self.criterion(a, self._taught(second)) + self.criterion(b, self._taught(first)))
        elif self.kind == "SimSiam":
            a, b = self._embedded(first), self._embedded(second)
            p, q = self.predictor(a), self.predictor(b)
            loss = 0.5 * (self.criterion(a.detach(), q) + self.criterion(b.detach(), p))
        elif self.kind == "NNCLR":
            a, b = self._embedded(first), self._embedded(second)
            p, q = self.predictor(a), self.predictor(b)
            a, b = self.bank(a.detach(), update=False), self.bank(b.detach(), update=True)
            loss = 0.5 * (self.criterion(a, q) + self.criterion(b, p))
        else:
            loss = self.criterion(self._embedded(first), self._embedded(second))
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.06)


def _views(kind: str) -> Made:
    torch.manual_seed(0)
    a, b = _pictures(), _pictures()[::-1]
    samples = [((x, y), torch.tensor(0), str(i)) for i, (x, y) in enumerate(zip(a, b, strict=True))]
    return _TwoViews(kind), samples, None


# ---------------------------------------------------------------------- time series
def _gluonts(path: str, settings: dict[str, Any]) -> Made:
    """Windows of series as the estimator's own loader cuts them."""
    import numpy
    from gluonts.dataset.common import ListDataset

    torch.manual_seed(0)
    numpy.random.seed(0)
    module, _, name = path.rpartition(".")
    estimator = getattr(importlib.import_module(f"gluonts.torch.model.{module}"), name)(
        prediction_length=4, context_length=8, batch_size=1, num_batches_per_epoch=COUNT, **settings
    )
    random = numpy.random.RandomState(1)
    series = [{"start": "2020-01-01", "target": random.rand(80).cumsum() + 1} for _ in range(4)]
    data = estimator.create_transformation().apply(ListDataset(series, freq="D"), is_train=True)
    model = estimator.create_lightning_module()
    loader = estimator.create_training_data_loader(data, model)
    samples = [{k: v[0] for k, v in batch.items() if isinstance(v, Tensor)} for batch in loader]
    return without_dropout(model), samples[:COUNT], None


def as_lightning() -> None:
    """Packages that know Lightning by its other name get the one that is here."""
    import lightning.pytorch as pl

    if "pytorch_lightning" in sys.modules and sys.modules["pytorch_lightning"] is not pl:
        return
    for name in ("", ".callbacks", ".callbacks.progress", ".core", ".loggers", ".strategies", ".trainer", ".tuner",
                 ".utilities", ".utilities.exceptions", ".utilities.rank_zero", ".utilities.types"):  # fmt: skip
        sys.modules[f"pytorch_lightning{name}"] = importlib.import_module(f"lightning.pytorch{name}")


def _nixtla(name: str, settings: dict[str, Any]) -> Made:
    """Series as the package's own data set and loader give them."""
    as_lightning()
    import numpy
    import pandas
    from neuralforecast import models
    from neuralforecast.tsdataset import TimeSeriesDataset, TimeSeriesLoader

    torch.manual_seed(0)
    random = numpy.random.RandomState(1)
    frame = pandas.concat([
        pandas.DataFrame({"unique_id": f"{i:02d}", "ds": pandas.date_range("2020-01-01", periods=24),
                          "y": random.rand(24).cumsum()})
        for i in range(COUNT)
    ])  # fmt: skip
    data, *_ = TimeSeriesDataset.from_df(frame)
    model = getattr(models, name)(h=4, input_size=8, max_steps=100, windows_batch_size=None, random_seed=1, **settings)
    loader = TimeSeriesLoader(data, batch_size=4)
    return without_dropout(model), [data[i] for i in range(COUNT)], loader._collate_fn


# ---------------------------------------------------------------------- cells
def _accessible() -> Made:
    """Accessible regions of single cells."""
    import anndata
    import numpy
    import scvi

    _quiet_noise()
    counts = numpy.random.RandomState(1).binomial(1, 0.3, (COUNT, 30)).astype("float32")
    cells = anndata.AnnData(counts, obs={"batch": numpy.arange(COUNT) % 2})
    scvi.model.PEAKVI.setup_anndata(cells, batch_key="batch")
    return _plan(scvi.model.PEAKVI(cells, n_hidden=16, n_latent=4, dropout_rate=0.0), scvi.train.TrainingPlan)


def _linear_cells() -> Made:
    import anndata
    import numpy
    import scvi

    _quiet_noise()
    counts = numpy.random.RandomState(1).poisson(2.0, (COUNT, 30)).astype("float32")
    cells = anndata.AnnData(counts, obs={"batch": numpy.arange(COUNT) % 2})
    scvi.model.LinearSCVI.setup_anndata(cells, batch_key="batch")
    model = scvi.model.LinearSCVI(cells, n_hidden=16, n_latent=4, dropout_rate=0.0)
    return _plan(model, scvi.train.TrainingPlan)


def _labelled_cells() -> Made:
    import anndata
    import numpy
    import scvi

    _quiet_noise()
    counts = numpy.random.RandomState(1).poisson(2.0, (COUNT, 30)).astype("float32")
    kinds = numpy.array(["a", "b", "c"])[numpy.arange(COUNT) % 3]
    cells = anndata.AnnData(counts, obs={"batch": numpy.arange(COUNT) % 2, "kind": kinds})
    scvi.model.SCANVI.setup_anndata(cells, labels_key="kind", unlabeled_category="none", batch_key="batch")
    model = scvi.model.SCANVI(cells, n_hidden=16, n_latent=4, dropout_rate=0.0)
    return _plan(model, lambda module: scvi.train.SemiSupervisedTrainingPlan(module, 3))


def _quiet_noise() -> None:
    """The noise of variational autoencoders, like dropout, is off."""
    from scvi.nn import _base_components as components

    class Mean(torch.distributions.Normal):
        def rsample(self, sample_shape: Any = ()) -> Tensor:
            return self.loc

    components.Normal = Mean  # type: ignore[misc]
    torch.manual_seed(0)


def _plan(model: Any, plan: Callable[[Any], Any]) -> Made:
    import scvi

    loader = scvi.dataloaders.AnnDataLoader(model.adata_manager, batch_size=1, shuffle=False)
    samples = [{k: v[0] for k, v in batch.items()} for batch in loader]
    return without_dropout(plan(model.module)), samples, None


# ---------------------------------------------------------------------- satellite pictures
def _earth(name: str) -> Made:
    """The package's own tasks."""
    from torchgeo import trainers

    torch.manual_seed(0)
    settings: dict[str, Any] = {"weights": None, "in_channels": 4}
    g = generator()
    pictures = _pictures(32, 4, COUNT + ROWS)
    if name == "ClassificationTask":
        settings.update(model="resnet18", num_classes=5, task="multiclass", loss="ce")
        samples = [{"image": x, "label": torch.randint(5, (), generator=g)} for x in pictures]
    elif name == "RegressionTask":
        settings.update(model="resnet18", num_outputs=1, loss="mse")
        samples = [{"image": x, "label": torch.randn(1, generator=g)} for x in pictures]
    else:
        settings.update(model="resnet18")
        samples = [{"image": x} for x in pictures]
    return without_dropout(getattr(trainers, name)(**settings)), samples, None


# ---------------------------------------------------------------------- anomalies
def _anomalies(name: str, settings: dict[str, Any]) -> Made:
    from anomalib import models
    from anomalib.data import ImageBatch

    torch.manual_seed(0)
    model = getattr(models, name)(evaluator=False, visualizer=False, **settings)
    size = 256 if name == "Uflow" else 64
    pictures = _pictures(size)
    return without_dropout(model), pictures, lambda chosen: ImageBatch(image=torch.stack(chosen))


# ---------------------------------------------------------------------- uncertainty
def _uncertain(name: str, settings: Callable[[], dict[str, Any]]) -> Made:
    from lightning_uq_box import uq_methods

    g = generator()
    x, y = torch.randn(COUNT, 6, generator=g), torch.randn(COUNT, 1, generator=g)
    torch.manual_seed(0)
    model = getattr(uq_methods, name)(**settings())
    samples = [{"input": a, "target": b} for a, b in zip(x, y, strict=True)]
    return without_dropout(model), samples, None


def _routine(name: str) -> Made:
    from torch_uncertainty import routines

    if name == "ClassificationRoutine":
        model = _network(3)
        routine = routines.ClassificationRoutine(
            model, num_classes=3, loss=nn.CrossEntropyLoss(), optim_recipe=torch.optim.Adam(model.parameters(), 1e-2)
        )
        return routine, _table(lambda s: (s > 0).long() + (s > 1).long()), None
    model = _network(1)
    routine = routines.RegressionRoutine(
        model, output_dim=1, loss=nn.MSELoss(), optim_recipe=torch.optim.Adam(model.parameters(), 1e-2)
    )
    return routine, _table(lambda s: s), None


# ---------------------------------------------------------------------- tables
def _tables(name: str, settings: dict[str, Any]) -> Made:
    from deeptab import architectures, configs
    from deeptab.training import TaskModel

    torch.manual_seed(0)
    numbers = {f"n{i}": {"preprocessing": "none", "dimension": 1, "categories": None} for i in range(4)}
    kinds = {"kind": {"preprocessing": "int", "dimension": 1, "categories": 5}}
    model = TaskModel(
        getattr(architectures, name),
        getattr(configs, f"{name}Config")(**settings),
        (numbers, kinds, {}),
        num_classes=1,
        lr=1e-3,
        lr_patience=5,
        lr_factor=0.5,
        weight_decay=0.0,
        scheduler_type=None,
    )
    g = generator()
    samples = []
    for _ in range(COUNT):
        values = [torch.randn(1, generator=g) for _ in range(4)]
        samples.append(((values, [torch.randint(5, (1,), generator=g)], []), sum(values, torch.zeros(1))))
    return without_dropout(model), samples, None


# ---------------------------------------------------------------------- graphs
def _graphs() -> Made:
    """As the package's own Lightning example: GIN over batches of graphs."""
    from torch_geometric.data import Batch, Data
    from torch_geometric.nn import GIN, MLP, global_add_pool

    class Graphs(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.gnn, self.classifier = GIN(4, 16, 2, norm=None), MLP([16, 16, 3], norm=None, dropout=0.0)

        def training_step(self, data: Any, batch_idx: int) -> Any:
            h = self.gnn(data.x, data.edge_index)
            scores = self.classifier(global_add_pool(h, data.batch, size=data.num_graphs))
            loss = F.cross_entropy(scores, data.y)
            self.log("train_loss", loss, batch_size=data.num_graphs)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=0.01)

    torch.manual_seed(0)
    g = generator()
    samples = []
    for i in range(COUNT):
        nodes = 3 + i % 4
        edges = torch.randint(nodes, (2, 2 * nodes), generator=g)
        samples.append(Data(x=torch.randn(nodes, 4, generator=g), edge_index=edges, y=torch.tensor([i % 3])))
    return Graphs(), samples, Batch.from_data_list


# ---------------------------------------------------------------------- disentangled factors
def _factors(name: str) -> Made:
    from disent.frameworks import vae
    from disent.model import AutoEncoder
    from disent.model.ae import DecoderLinear, EncoderLinear

    torch.manual_seed(0)
    shape = (3, 8, 8)
    model = AutoEncoder(EncoderLinear(x_shape=shape, z_size=4, z_multiplier=2), DecoderLinear(x_shape=shape, z_size=4))
    kind = getattr(vae, name)
    settings = kind.cfg(optimizer="adam", optimizer_kwargs={"lr": 1e-3})
    framework = kind(model=model, cfg=settings)
    return framework, [{"x_targ": (x.sigmoid(),)} for x in _pictures(8)], None


# ---------------------------------------------------------------------- recommendations
def _items(name: str) -> Made:
    """Sequences of items that users looked at."""
    from replay.data import FeatureHint, FeatureSource, FeatureType
    from replay.data.nn import TensorFeatureInfo, TensorFeatureSource, TensorSchema
    from replay.models.nn.sequential import bert4rec, sasrec

    torch.manual_seed(0)
    item = TensorFeatureInfo(
        "item", feature_type=FeatureType.CATEGORICAL, is_seq=True, feature_hint=FeatureHint.ITEM_ID, cardinality=13,
        feature_sources=[TensorFeatureSource(FeatureSource.INTERACTIONS, "item")], embedding_dim=16, padding_value=12,
    )  # fmt: skip
    kind: Any = {"SasRec": sasrec.SasRec, "Bert4Rec": bert4rec.Bert4Rec}[name]
    model = kind(TensorSchema(item), block_count=1, head_count=2, hidden_size=16, max_seq_len=8, dropout_rate=0.0)
    g = generator()
    samples = []
    for i in range(COUNT):
        length = 3 + i % 6
        items = torch.full((9,), 12)
        items[-length:] = torch.randint(12, (length,), generator=g)
        seen = items != 12
        sample: dict[str, Any] = {"query_id": torch.tensor([i]), "padding_mask": seen[:-1]}
        if name == "SasRec":
            sample |= {"feature_tensor": {"item": items[:-1]}}
            sample |= {"positive_labels": items[1:], "target_padding_mask": seen[1:]}
        else:
            sample = {"query_id": torch.tensor([i]), "pad_mask": seen[:-1], "inputs": {"item": items[:-1]}}
            sample |= {"positive_labels": items[:-1], "token_mask": torch.rand(8, generator=g) > 0.3}
        samples.append(sample)
    return without_dropout(model), samples, None


def _tours(name: str) -> Made:
    """A policy that builds tours greedily, trained by REINFORCE: its reward is a loss of what it chose itself."""
    from rl4co import models
    from rl4co.envs.routing import TSPEnv, TSPGenerator

    env = TSPEnv(generator=TSPGenerator(num_loc=6))
    torch.manual_seed(0)
    sizes = {"embed_dim": 16, "num_encoder_layers": 1, "num_heads": 2, "normalization": "instance"}
    kinds = {"AttentionModel": models.AttentionModelPolicy, "PtrNet": models.PointerNetworkPolicy}
    policy = kinds[name](
        env_name=env.name,
        train_decode_type="greedy",
        **(sizes if name == "AttentionModel" else {"embed_dim": 16, "hidden_dim": 16}),
    )
    model = models.REINFORCE(env, policy, baseline="exponential", optimizer_kwargs={"lr": 1e-3})
    return model, list(torch.rand(COUNT, 6, 2, generator=generator())), _towns


def _towns(samples: list[Tensor]) -> Any:
    from tensordict import TensorDict

    return TensorDict({"locs": torch.stack(samples)}, batch_size=[len(samples)])


_NORM = {"flags": (("precision", "64-true"),), "note": "in float64, for its last batch norm"}
_HOOK = {"note": "a hook looks at gradients: a graph up to there and one for the update",
         "couples": "the step keeps what it predicts, of all rows"}  # fmt: skip
_VIEWS = {"couples": "each picture is compared with all others", **_NORM}
MORE: list[tuple[str, str, str, Callable[[], Made], dict[str, Any]]] = [
    *[(name, "pytorch_forecasting", "time series", lambda n=name, s=settings: forecasting(n, s), _HOOK)
      for name, settings in [
          ("NHiTS", {"hidden_size": 16}),
          ("DeepAR", {"hidden_size": 8}),
          ("RecurrentNetwork", {"hidden_size": 8}),
      ]],
    *[(path.rpartition(".")[2].removesuffix("Estimator"), "gluonts", "time series",
       lambda p=path, s=settings: _gluonts(p, s),
       {"couples": "objects of torch.distributions, which hold each other, keep them until Python collects them"})
      for path, settings in [
          ("deepar.DeepAREstimator", {"freq": "D", "hidden_size": 8, "lags_seq": [1, 2, 3]}),
          ("simple_feedforward.SimpleFeedForwardEstimator", {"hidden_dimensions": [16]}),
          ("d_linear.DLinearEstimator", {"hidden_dimension": 8}),
          ("patch_tst.PatchTSTEstimator", {"patch_len": 4, "d_model": 8, "nhead": 2, "dim_feedforward": 16}),
          ("tide.TiDEEstimator", {"freq": "D"}),
      ]],
    *[(name, "neuralforecast", "time series", lambda n=name, s=settings: _nixtla(n, s),
       {"note": "with a pandas Index in the batch: batches of each rank's own",
        "draws": "its batch norm is each rank's own" if name == "PatchTST" else ""})
      for name, settings in [
          ("NHITS", {"mlp_units": 3 * [[16, 16]]}),
          ("MLP", {"hidden_size": 16}),
          ("DLinear", {"moving_avg_window": 3}),
          ("PatchTST", {"hidden_size": 8, "n_heads": 2, "linear_hidden_size": 16, "encoder_layers": 1, "patch_len": 4}),
          ("TCN", {"encoder_hidden_size": 8, "decoder_hidden_size": 8}),
      ]],
    *[(kind, "lightly", "self-supervised vision", lambda k=kind: _views(k),
       {**_VIEWS, "eager": "on several ranks the package's loss calls torch.distributed.all_reduce"
        if kind == "DINO" else ""})
      for kind in ("SimCLR", "MoCo", "BYOL", "SimSiam", "BarlowTwins", "VICReg", "NNCLR", "DINO", "SwAV")],
    ("PEAKVI", "scvi", "cells", _accessible, {}),
    ("LinearSCVI", "scvi", "cells", _linear_cells, {}),
    ("SCANVI", "scvi", "cells", _labelled_cells, {"couples": "all rows are repeated for each label in turn"}),
    *[(name, "torchgeo", "satellite pictures", lambda n=name: _earth(n), _NORM)
      for name in ("ClassificationTask", "RegressionTask")],
    *[(name, "lightning_uq_box", "uncertainty", lambda n=name, s=settings: _uncertain(n, s), {})
      for name, settings in [
          ("MVERegression", lambda: {"model": _network(2), "burnin_epochs": 0}),
          ("QuantileRegression", lambda: {"model": _network(3)}),
          ("DER", lambda: {"model": _network(4)}),
          ("MCDropoutRegression", lambda: {"model": _network(1), "num_mc_samples": 3, "loss_fn": nn.MSELoss()}),
      ]],
    *[(name, "torch_uncertainty", "uncertainty", lambda n=name: _routine(n), {})
      for name in ("ClassificationRoutine", "RegressionRoutine")],
    *[(name, "deeptab", "tables", lambda n=name, s=settings: _tables(n, s), {})
      for name, settings in [
          ("MLP", {"layer_sizes": [16, 8]}),
          ("FTTransformer", {"d_model": 8, "n_layers": 1, "n_heads": 2}),
          ("ResNet", {"layer_sizes": [16, 8], "num_blocks": 2}),
          ("TabM", {"layer_sizes": [16, 8], "ensemble_size": 2}),
      ]],
    *[(name, "rl4co", "reinforcement learning", lambda n=name: _tours(n),
       {"couples": "its baseline is the mean of all rows' rewards",
        "draws": "samples its actions, other numbers on each rank" if name == "PtrNet" else ""})
      for name in ("AttentionModel", "PtrNet")],
    ("GIN", "torch_geometric", "graphs", _graphs, {}),
    *[(name, "disent", "factors of pictures", lambda n=name: _factors(n),
       {"draws": "draws noise, other numbers on each rank", **couples})
      for name, couples in [("BetaVae", {}), ("DipVae", {"couples": "the covariance of factors is the batch's"})]],
    *[(name, "replay", "recommendations", lambda n=name: _items(n), couples)
      for name, couples in [("SasRec", {}), ("Bert4Rec", {"couples": "hidden places are picked from all rows"})]],
]  # fmt: skip
