"""Parameters that lie in memory in every way, through the Trainer: equal to one device, or refused by name."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_spmd.errors import ConfigurationError
from lightning_spmd.ir.layout import has_layout
from lightning_spmd.ir.node_info import TensorSpec
from tests.helpers.odd_layouts import OddLayouts, images
from tests.helpers.ranks import RankError, RankPool
from tests.helpers.training import InOrder, Result, assert_bitwise, assert_compiled, deviation, fit

ACCUMULATE = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}


def _train(optimizer: str, strategy: Any, devices: int, module: Any = None, **flags: Any) -> Result:
    L.seed_everything(devices)  # ranks do not begin with the weights of the one device by chance
    module = OddLayouts(optimizer, gaps="fused" not in optimizer) if module is None else module()
    return fit(module, InOrder(images(24), 4), strategy, devices, **{"max_epochs": 2, **flags})[0]


def _assert_equal(results: list[Result], reference: Result) -> None:
    assert_compiled(*results)
    for result in results:
        found = deviation(result, reference)
        assert max(found.loss, found.weights) < 1e-12, found


@pytest.mark.parametrize("optimizer", ["adamw_fused", "sgd_fused", "adagrad_fused", "adam_foreach", "rmsprop"])
def test_one_device_is_bitwise_eager(optimizer: str) -> None:
    ours = _train(optimizer, "spmd", 1, **ACCUMULATE)
    assert_compiled(ours)
    assert_bitwise(ours, _train(optimizer, "auto", 1, **ACCUMULATE))


@pytest.mark.parametrize(
    ("plan", "optimizer", "flags"),
    [
        ("replicate", "adamw_fused", {}),
        ("zero2", "adam_foreach", {}),
        ("zero3", "sgd_fused", ACCUMULATE),
        pytest.param("replicate", "sgd_fused", ACCUMULATE, marks=pytest.mark.long),
        pytest.param("zero2", "adamw_fused", {}, marks=pytest.mark.long),
        pytest.param("zero3", "adamw_fused", {}, marks=pytest.mark.long),
        pytest.param("replicate", "adam_foreach", {}, marks=pytest.mark.long),
        pytest.param("zero2", "sgd_fused", ACCUMULATE, marks=pytest.mark.long),
        pytest.param("zero3", "adam_foreach", {}, marks=pytest.mark.long),
    ],
)
def test_two_ranks_equal_one_device(two_ranks: RankPool, plan: str, optimizer: str, flags: dict[str, Any]) -> None:
    results = two_ranks.run(_train, optimizer, {"data_parallel": plan}, 2, **flags)
    _assert_equal(results, _train(optimizer, "auto", 1, **flags))


def _train_from_other_weights(plan: str) -> list[Result]:
    """Rank 0's weights count; those of rank 1 are others, and lie otherwise."""

    def module() -> L.LightningModule:
        made = OddLayouts("adam_foreach", gaps=True)
        if os.environ["RANK"] == "1":
            with torch.no_grad():
                for parameter in made.parameters():
                    parameter.fill_(0.1)
        return made

    return [_train("adam_foreach", {"data_parallel": plan}, 2, module)]


@pytest.mark.parametrize("plan", ["replicate", "zero3"])
def test_all_ranks_begin_with_the_first_ones_weights_also_between_gaps(two_ranks: RankPool, plan: str) -> None:
    results = two_ranks.run(_train_from_other_weights, plan)
    _assert_equal([r for (r,) in results], _train("adam_foreach", "auto", 1))


class Hooked(OddLayouts):
    """A hook that looks at gradients: they leave the graph, and must lie as their parameters."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in self.parameters():
            assert parameter.grad is not None
            assert has_layout(parameter.grad, TensorSpec.of(parameter))


class Replacing(OddLayouts):
    """A hook that puts a plain copy of each gradient in its place."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad = parameter.grad.contiguous()


@pytest.mark.parametrize("plan", ["replicate", "zero3"])
def test_gradients_that_a_hook_replaces_may_lie_as_they_like(two_ranks: RankPool, plan: str) -> None:
    reference = _train("adamw_fused", "auto", 1)
    results = [_train("adamw_fused", "spmd", 1, Replacing)] if plan == "replicate" else []
    results += two_ranks.run(_train, "adamw_fused", {"data_parallel": plan}, 2, Replacing)
    for result in results:
        assert result.mode == "split", result.warnings
        assert deviation(result, reference).weights < 1e-12


@pytest.mark.parametrize("plan", ["replicate", pytest.param("zero2", marks=pytest.mark.long), "zero3"])
def test_gradients_that_a_hook_sees_lie_as_their_parameters(two_ranks: RankPool, plan: str) -> None:
    results = two_ranks.run(_train, "adamw_fused", {"data_parallel": plan}, 2, Hooked)
    reference = _train("adamw_fused", "auto", 1)
    for result in results:
        assert result.mode == ("split" if plan == "zero2" else "compiled"), result.warnings
        assert deviation(result, reference).weights < 1e-12


class Relaid(OddLayouts):
    """Its weights, or its optimizer's state, are put in another order of memory after the fourth batch."""

    what = "weights"

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.global_step != 4:
            return
        (optimizer,) = self.trainer.optimizers
        for parameter in self.parameters() if self.what == "weights" else ():
            parameter.data = parameter.detach().contiguous()
        for parameter in self.parameters() if self.what == "state" else ():
            state = optimizer.state[parameter]
            state.update({k: v.contiguous() for k, v in state.items()})


class RelaidState(Relaid):
    what = "state"


@pytest.mark.parametrize("module", [Relaid, RelaidState])
def test_what_is_laid_out_anew_in_mid_run_is_seen(two_ranks: RankPool, module: Any) -> None:
    reference = _train("adamw_fused", "auto", 1)  # eager training that is laid out anew walks wrongly, silently
    one = _train("adamw_fused", "spmd", 1, module)
    both = two_ranks.run(_train, "adamw_fused", "spmd", 2, module)
    for result in (one, *both):
        assert_compiled(result)
        assert deviation(result, reference).weights < 1e-12


def _resume(path: Path, strategy: Any, devices: int) -> Result:
    """Go on from a checkpoint of a run with plain weights, with weights in other orders."""
    return _train("adamw_fused", strategy, devices, max_epochs=4, ckpt_path=path)


class Plain(OddLayouts):
    """The same weights in the plain order."""

    def __init__(self, optimizer: str = "adamw_fused") -> None:
        super().__init__(optimizer)
        for parameter in self.parameters():
            parameter.data = parameter.detach().contiguous()


@pytest.mark.parametrize(
    "plan", ["zero3", *[pytest.param(plan, marks=pytest.mark.long) for plan in ("replicate", "zero2")]]
)
def test_a_checkpoint_of_plain_weights_goes_on_with_weights_in_any_order(
    two_ranks: RankPool, plan: str, tmp_path: Path
) -> None:
    path = tmp_path / "plain.ckpt"
    _, trainer = fit(Plain(), InOrder(images(24), 4), max_epochs=2)
    trainer.save_checkpoint(path)
    reference = fit(Plain(), InOrder(images(24), 4), max_epochs=4)[0]
    for result in (_resume(path, "spmd", 1), *two_ranks.run(_resume, path, {"data_parallel": plan}, 2)):
        assert_compiled(result)
        for name, weight in reference.weights.items():
            assert float((result.weights[name] - weight).abs().amax() if weight.numel() else 0) < 1e-12, name


class Gaps(OddLayouts):
    """A fused optimizer and a parameter with gaps."""

    def __init__(self) -> None:
        super().__init__("adamw_fused", gaps=True)


class Expanded(OddLayouts):
    """A parameter of which one row is all rows."""

    def __init__(self) -> None:
        super().__init__("adam")
        self.last = nn.Parameter(torch.ones(1, 3, dtype=torch.float64).expand(5, 3))


class Shared(OddLayouts):
    """Two parameters that are one piece of memory, as ``a.weight.data = b.weight.data`` leaves them."""

    def __init__(self) -> None:
        super().__init__("adam")
        self.twin = nn.Parameter(self.turned.data)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.twin.sum()


class Watched(OddLayouts):
    """A plain attribute that is a piece of a trained parameter, read in the step."""

    def __init__(self) -> None:
        super().__init__("adam")
        self.norm = nn.Identity()  # eager training on several ranks has other statistics than one device
        self.watched = self.turned.data[:2]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.watched.sum()


class Frozen(OddLayouts):
    """What nobody updates may overlap: an expanded buffer, a frozen view of another frozen parameter."""

    def __init__(self) -> None:
        super().__init__("adam_foreach")
        self.register_buffer("ones", torch.ones(1, 3, dtype=torch.float64).expand(5, 3))
        self.fixed = nn.Parameter(torch.ones(5, 3, dtype=torch.float64), requires_grad=False)
        self.rows = nn.Parameter(self.fixed.data[:1].expand(5, 3), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + (self.ones * self.fixed * self.rows).sum()


def test_gaps_under_a_fused_optimizer_are_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match="parameter last of shape .* gaps between its elements.*fused=True"):
        _train("", "spmd", 1, Gaps)


def test_a_trained_parameter_that_overlaps_itself_is_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match=r"parameter last of shape .* the same place in memory.*clone\(\)"):
        _train("", "spmd", 1, Expanded)


def test_trained_parameters_that_share_memory_run_on_one_device_and_are_refused_on_more(two_ranks: RankPool) -> None:
    assert_bitwise(_train("", "spmd", 1, Shared), _train("", "auto", 1, Shared))
    with pytest.raises(RankError, match="turned and twin share memory"):
        two_ranks.run(_train, "", "spmd", 2, Shared)


class Listed(Watched):
    """The same where no attribute of the module has that piece."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces = [self.watched]
        del self.watched

    def forward(self, x: Tensor) -> Tensor:
        return OddLayouts.forward(self, x) + self.pieces[0].sum()


@pytest.mark.parametrize(("module", "named"), [(Watched, "watched"), (Listed, r"the tensor that \S+\.py:\d+ reads")])
def test_a_view_of_a_trained_parameter_trains_eagerly_on_several_ranks(
    two_ranks: RankPool, module: Any, named: str
) -> None:
    reference = _train("", "auto", 1, module)
    assert_bitwise(_train("", "spmd", 1, module), reference)
    results = two_ranks.run(_train, "", "spmd", 2, module)
    assert any(re.search(f"eagerly .* turned and {named}", message) for message in results[0].warnings)
    for result in results:
        assert result.mode == "eager"
        assert deviation(result, reference).weights < 1e-12


@pytest.mark.parametrize("plan", ["replicate", "zero3"])
def test_what_nobody_updates_may_overlap(two_ranks: RankPool, plan: str) -> None:
    reference = _train("", "auto", 1, Frozen)
    assert_bitwise(_train("", "spmd", 1, Frozen), reference)
    _assert_equal(two_ranks.run(_train, "", {"data_parallel": plan}, 2, Frozen), reference)
