"""GPTBytes: causal, scheduled, generating."""

import math
from types import SimpleNamespace

import pytest
import torch

from lightning_spmd.examples import GPTBytes


@pytest.fixture
def module() -> GPTBytes:
    torch.manual_seed(0)
    return GPTBytes(width=16, layers=2, heads=2, sequence_length=8).eval()


def test_a_position_does_not_see_what_comes_after_it(module: GPTBytes) -> None:
    tokens = torch.randint(256, (2, 8))
    changed = tokens.clone()
    changed[:, 5:] = 0
    assert torch.equal(module(tokens)[:, :5], module(changed)[:, :5])
    assert not torch.equal(module(tokens)[:, 5:], module(changed)[:, 5:])


def test_an_untrained_module_knows_nothing(module: GPTBytes) -> None:
    tokens = torch.randint(256, (32, 9))
    bits = module.loss({"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}) / math.log(2)
    assert bits.item() == pytest.approx(8, abs=0.1)


def test_every_parameter_is_optimized_once_and_vectors_do_not_decay(module: GPTBytes) -> None:
    module.trainer = SimpleNamespace(estimated_stepping_batches=10, precision="32-true")
    decayed, kept = module.configure_optimizers()["optimizer"].param_groups
    assert {*decayed["params"], *kept["params"]} == {*module.parameters()}
    assert len(decayed["params"]) + len(kept["params"]) == len([*module.parameters()])
    assert kept["weight_decay"] == 0
    assert all(p.dim() < 2 for p in kept["params"])


@pytest.mark.parametrize(("total", "last"), [(100, 0.1), (math.inf, 1.0)])
def test_learning_rate_warms_up_then_decays_where_there_is_an_end(module: GPTBytes, total: float, last: float) -> None:
    module.trainer = SimpleNamespace(estimated_stepping_batches=total, precision="32-true")
    factor, _ = module.configure_optimizers()["lr_scheduler"]["scheduler"].lr_lambdas
    assert factor(0) == pytest.approx(1 / 20)
    assert factor(20) == pytest.approx(1)
    assert factor(100) == pytest.approx(last)


def test_generating_keeps_the_prompt_and_repeats_with_a_seed(module: GPTBytes) -> None:
    prompt = torch.tensor([list(b"def ")])
    texts = [
        module.generate(prompt, length=12, temperature=1.0, generator=torch.Generator().manual_seed(seed))
        for seed in (1, 1, 2)
    ]
    assert texts[0].shape == (1, 16)
    assert torch.equal(texts[0][:, :4], prompt)
    assert torch.equal(texts[0], texts[1])
    assert not torch.equal(texts[0], texts[2])


def test_heads_that_do_not_divide_the_width_are_named() -> None:
    with pytest.raises(ValueError, match="width=16, heads=3"):
        GPTBytes(width=16, heads=3)
