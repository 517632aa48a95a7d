"""Updates of single parameters become operators on lists: the same numbers, bucket by bucket."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from lightning_spmd.errors import VerificationError
from lightning_spmd.ir.dependence import Dependences
from lightning_spmd.ir.steps import ShardedStep
from lightning_spmd.ir.verify import is_wait
from lightning_spmd.stages.passes import PASSES, GraphPass, PassState, bucket_collectives, run_passes
from lightning_spmd.stages.passes.optimizer import fuse_optimizer
from lightning_spmd.stages.passes.optimizer.homes import WORKING_SET
from lightning_spmd.stages.passes.optimizer.lists import ITEM, Each
from tests.helpers.simulate import expand_all, run_ranks
from tests.helpers.tiny_capture import capture_module
from tests.stages.expand.test_models import captured_model, sgd
from tests.stages.passes.with_passes import assert_same_bits, targets

Update = Callable[[list[Tensor], list[Tensor]], None]
BUCKETS = bucket_collectives.PASS
FUSE = fuse_optimizer.PASS


def each(update: Callable[[Tensor, Tensor], Any]) -> Update:
    """The update of all parameters, one after the other, as optimizers on the host write it."""

    def run(parameters: list[Tensor], gradients: list[Tensor]) -> None:
        for p, g in zip(parameters, gradients, strict=True):
            update(p, g)

    return run


def prepared(
    update: Update, passes: list[GraphPass], size: float = 25.0, width: int = 8, depth: int = 4
) -> tuple[Any, ...]:
    """(every rank's program, state of the passes, live inputs) of a net of some layers."""
    torch.manual_seed(0)
    layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.Tanh())]
    batch = (torch.randn(6, width), torch.randn(6, width))
    captured, live = capture_module(
        nn.Sequential(*layers), lambda m, x, y: (m(x) - y).square().sum(), batch, update=update
    )
    state = PassState(bucket_size_mb=size)
    return [run_passes(step, passes, state) for step in expand_all(captured, (3, 3))], state, live


def lists(step: ShardedStep) -> list[fx.Node]:
    return [n for n in step.graph_module.graph.nodes if "_foreach_" in str(n.target)]


def _special(t: Tensor) -> Tensor:
    """Its values with signed zeros, infinities and NaN among them."""
    with_zero = t * t.abs().gt(0.02)
    return (with_zero / with_zero.abs().gt(0.03)).mul(1.5)


IN_PLACE_UNARY = (
    "abs",
    "neg",
    "sqrt",
    "sign",
    "exp",
    "tanh",
    "sigmoid",
    "reciprocal",
    "rsqrt",
    "erf",
    "floor",
    "round",
    "zero",
)
FAMILIES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    **{f"{name}_": (lambda p, g, f=name: getattr(p, f"{f}_")()) for name in IN_PLACE_UNARY},
    **{name: (lambda p, g, f=name: p.copy_(getattr(torch, f)(_special(g)))) for name in IN_PLACE_UNARY[:-1]},
    "clone": lambda p, g: p.copy_(g.clone()),
    "add alpha": lambda p, g: p.add_(g, alpha=-0.3),
    "add number": lambda p, g: p.copy_(g + 1e-3),
    "sub": lambda p, g: p.sub_(g, alpha=0.7).copy_(p - 0.1),
    "mul": lambda p, g: p.mul_(g.tanh()).mul_(0.9),
    "div": lambda p, g: p.div_(_special(g)).div_(3.0),
    "pow": lambda p, g: p.copy_(p.abs().pow(1.7).pow_(g)),
    "maximum": lambda p, g: torch.maximum(p, _special(g), out=p),
    "minimum": lambda p, g: p.copy_(torch.minimum(p, _special(g))),
    "clamp_min": lambda p, g: p.copy_(_special(g).clamp_min(-0.1)),
    "clamp_max": lambda p, g: p.copy_(_special(g)).clamp_max_(0.0),
    "clamp": lambda p, g: p.copy_(_special(g).clamp(-0.1, 0.2)),
    "clamp_": lambda p, g: p.copy_(_special(g)).clamp_(-0.1, 0.2),
    "clamp_ of a view": lambda p, g: (p.view(-1).clamp_(-0.1, 0.2), p.copy_(p.flip(0))),
    "addcmul": lambda p, g: p.copy_(p.addcmul(g, g, value=0.3)).addcmul_(g, g),
    "addcdiv": lambda p, g: p.copy_(p.addcdiv(g, p, value=-0.3)).addcdiv_(g, p),
    "lerp": lambda p, g: p.lerp_(g, 0.3).copy_(p.lerp(g, p)),
    "norm": lambda p, g: p.div_(torch.linalg.vector_norm(g)),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_an_operator_on_lists_computes_the_bits_of_the_operator_on_one_tensor(family: str) -> None:
    update = each(FAMILIES[family])
    plain, _, live = prepared(update, [BUCKETS], depth=2)
    steps, state, _ = prepared(update, [BUCKETS, FUSE], depth=2)
    wanted, got = run_ranks(plain, live), run_ranks(steps, live)
    for want, have in zip((*wanted[0], *wanted[1]), (*got[0], *got[1]), strict=True):
        assert torch.equal(want.nan_to_num(7.0), have.nan_to_num(7.0))
        assert torch.equal(want.signbit(), have.signbit())
    name = family.split()[0].rstrip("_")
    known = family != "clone" or hasattr(torch.ops.aten, "_foreach_clone")  # torch 2.11 has none
    assert any(f"_foreach_{name}" in t for t in targets(steps[0])) == known, state.notes


def test_adam_written_by_hand_becomes_one_list_of_operators() -> None:
    def adam(p: Tensor, g: Tensor) -> None:
        m, v = torch.zeros_like(p).lerp_(g, 0.1), torch.zeros_like(p).addcmul_(g, g, value=0.01)
        p.mul_(0.99).addcdiv_(m, v.sqrt().div(0.5).add_(1e-8), value=-0.01)

    steps, state, _ = prepared(each(adam), [BUCKETS, FUSE])
    short = [t for t in targets(steps[0]) if "foreach" in t]
    # the temporary of the square root is used again, so the division is in place
    assert [t.split(".")[0].removeprefix("_foreach_") for t in short] == (
        ["lerp_", "addcmul_", "mul_", "sqrt", "div_", "add_", "addcdiv_"]
    ), short
    assert all(len(n.args[0]) == 8 for n in lists(steps[0]))
    assert "operators became" in state.notes["fuse_optimizer"]


def test_a_list_waits_for_one_bucket_alone() -> None:
    def decayed(p: Tensor, g: Tensor) -> None:
        p.mul_(0.99)
        p.add_(g, alpha=-0.1)

    steps, _, live = prepared(each(decayed), [BUCKETS, FUSE], size=0.0006)
    assert_same_bits(prepared(each(decayed), [BUCKETS], size=0.0006)[0], steps, live)
    dependences = Dependences(steps[0].graph_module.graph)
    waits = {n for n in dependences.order if is_wait(n)}
    additions = [n for n in lists(steps[0]) if "add_" in str(n.target)]
    assert len(additions) > 1
    needed = [dependences.origins([n]) & waits for n in additions]
    assert all(len(one) == 1 for one in needed)
    assert len(set.union(*needed)) == len(additions), "two lists for one bucket"
    # weight decay needs no gradient, but moves with the bucket: the same parameters in the same order
    decays = [n.args[0] for n in lists(steps[0]) if "mul_" in str(n.target)]
    assert sorted(map(str, decays)) == sorted(str(n.args[0]) for n in additions)


def test_norms_of_clipping_wait_for_their_own_bucket_and_the_update_for_all() -> None:
    def clipped(parameters: list[Tensor], gradients: list[Tensor]) -> None:
        total = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in gradients]))
        factor = (0.1 / (total + 1e-6)).clamp(max=1.0)
        for g in gradients:
            g.mul_(factor)
        each(lambda p, g: p.add_(g, alpha=-0.1))(parameters, gradients)

    steps, _, live = prepared(clipped, [BUCKETS, FUSE], size=0.0006)
    assert_same_bits(prepared(clipped, [BUCKETS], size=0.0006)[0], steps, live)
    dependences = Dependences(steps[0].graph_module.graph)
    waits = {n for n in dependences.order if is_wait(n)}
    by_name = {t: [n for n in lists(steps[0]) if t in str(n.target)] for t in ("norm", "mul_", "add_")}
    assert {len(dependences.origins([n]) & waits) for n in by_name["norm"]} == {1}
    assert [str(n.target) for n in by_name["mul_"]] == ["aten._foreach_mul_.Tensor"], "the factor is one for all"
    assert len(by_name["add_"]) == 1


def test_parameters_that_fill_the_cache_stay_in_lists_of_their_own() -> None:
    width = 200
    update = each(lambda p, g: p.mul_(0.99).add_(g, alpha=-0.1))
    steps, _, _ = prepared(update, [BUCKETS, FUSE], width=width)
    sizes = [sum(a.meta["val"].bytes for a in n.args[0]) for n in lists(steps[0])]
    assert len(sizes) > 2
    assert max(sizes) <= WORKING_SET
    order = [str(n.args[0]) for n in lists(steps[0])]
    assert order[::2] == order[1::2], "one part after the other, while its parameters are in the cache"


def test_updates_that_read_one_another_keep_their_order() -> None:
    def chained(parameters: list[Tensor], gradients: list[Tensor]) -> None:
        scratch = torch.zeros_like(parameters[1])
        biases = [(p, g) for p, g in zip(parameters, gradients, strict=True) if p.ndim == 1]
        for p, g in biases:
            scratch.add_(p)
            p.mul_(0.9).add_(g, alpha=-0.1).add_(scratch)
        for (p, _), (q, _) in zip(biases, biases[1:], strict=False):
            p.add_(q)

    steps, _, live = prepared(chained, [BUCKETS, FUSE])
    assert_same_bits(prepared(chained, [BUCKETS])[0], steps, live)


def test_what_is_joined_only_where_numbers_are_the_same() -> None:
    def two_rates(parameters: list[Tensor], gradients: list[Tensor]) -> None:
        for p, g in zip(parameters, gradients, strict=True):
            p.add_(g, alpha=-0.1 if p.ndim == 1 else -0.2)

    steps, _, live = prepared(two_rates, [BUCKETS, FUSE])
    assert_same_bits(prepared(two_rates, [BUCKETS])[0], steps, live)
    assert sorted(n.kwargs["alpha"] for n in lists(steps[0])) == [-0.2, -0.1]


def test_numbers_of_each_parameter_are_computed_in_lists() -> None:
    column = Each(operator.truediv)(0.1, Each(operator.sub)(1.0, Each(pow)(0.9, Each(ITEM)([torch.ones(())] * 3))))
    assert column == [0.1 / (1.0 - 0.9**1.0)] * 3
    assert str(Each(operator.sub)) == "each_sub"


# ---------------------------------------------------------------- nothing to do
@pytest.mark.parametrize(
    ("update", "passes"),
    [
        (each(lambda p, g: p.add_(g, alpha=-0.1)), []),  # every gradient has a collective of its own
        (sgd, [BUCKETS]),  # lists already
        (each(lambda p, g: p.copy_(torch.where(g > 0, p, g))), [BUCKETS]),
    ],
    ids=["no buckets", "foreach", "no counterpart"],
)
def test_nothing_is_joined_where_there_is_nothing_to_join(update: Update, passes: list[GraphPass]) -> None:
    steps, state, _ = prepared(update, passes)
    before = targets(steps[0])
    FUSE.run(steps[0], state)
    if "copy_" in str(before):  # the last operator of the third has a counterpart
        before, after = ([t for t in ts if "copy" not in t] for ts in (before, targets(steps[0])))
        assert before == after
    else:
        assert targets(steps[0]) == before
        assert "fuse_optimizer" not in state.notes


def test_a_graph_without_an_update_is_left_alone() -> None:
    captured, _ = captured_model("mlp")
    (step, *_) = expand_all(captured, (3, 3))
    run_passes(step, [BUCKETS], PassState())
    before = targets(step)
    run_passes(step, [FUSE], PassState())
    assert targets(step) == before


def test_other_devices_are_left_alone() -> None:
    steps, _, _ = prepared(each(lambda p, g: p.add_(g, alpha=-0.1)), [BUCKETS])
    assert fuse_optimizer.join_updates(steps[0], lambda _: False) == ""
    assert lists(steps[0]) == []


# ---------------------------------------------------------------- broken
@pytest.mark.parametrize("too_early", ["the backward pass", "the wait"])
def test_the_verifier_catches_a_list_that_is_updated_too_early(too_early: str) -> None:
    def break_it(step: ShardedStep, state: PassState) -> None:
        fuse_optimizer.fuse_optimizer(step, state)
        graph = step.graph_module.graph
        moved = next(n for n in lists(step) if ("mul_" if "backward" in too_early else "add_") in str(n.target))
        first = next(n for n in graph.nodes if n.op == "call_function")
        first.prepend(moved)

    decayed = each(lambda p, g: (p.mul_(0.99), p.add_(g, alpha=-0.1)))
    steps, _, _ = prepared(decayed, [BUCKETS])
    with pytest.raises(VerificationError, match="'broken' broke the graph"):
        run_passes(steps[0], [GraphPass("broken", break_it)], PassState())


def test_the_pass_is_a_default_and_comes_after_the_buckets() -> None:
    names = [p.name for p in PASSES]
    assert names.index("split_optimizer") < names.index("fuse_optimizer")
    assert not FUSE.changes_numerics
