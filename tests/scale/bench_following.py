"""What it costs that the user's Python runs in every step: a followed forward pass beside one that is handed results.

``python -m tests.scale.bench_following`` runs each module under a mode of torch functions that gives what the last pass
gave, without a look at what is called (the least that any such way can cost), under the follower, and plainly; in turn,
in one process, and prints medians of processor time. The difference of the first two, divided by the number of calls,
is what comparing a call costs.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_spmd.examples.gpt_bytes import GPT
from lightning_spmd.stages.capture.follow.follower import Follower
from lightning_spmd.stages.capture.follow.step import Step


class HandedOut(TorchFunctionMode):
    """Gives what the last pass gave, call for call.

    Args:
        kinds: what the follower takes each function for: what is no call is asked.
    """

    def __init__(self, kinds: dict[Any, str]) -> None:
        super().__init__()
        self.kinds, self.results, self.at, self.is_first = kinds, list[Any](), 0, True

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.kinds.get(func) != "call":
            return func(*args, **(kwargs or {}))
        if self.is_first:
            self.results.append(func(*args, **(kwargs or {})))
        self.at += 1
        return self.results[self.at - 1]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.scale.bench_following", description=__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'module':14} {'calls':>6} {'plain':>10} {'handed out':>11} {'followed':>10} {'a call':>9}")
    for name, (module, given) in modules().items():
        calls, plain, handed, followed = measured(module, given, options.rounds)
        each = (followed - handed) / calls * 1e6
        print(
            f"{name:14} {calls:6} {plain * 1e3:7.2f} ms {handed * 1e3:8.2f} ms {followed * 1e3:7.2f} ms {each:6.2f} us"
        )


def measured(module: nn.Module, given: Tensor, rounds: int) -> tuple[int, float, float, float]:
    """The number of calls, and medians of a pass: plain, handed out, followed."""
    names = {id(t): name for name, t in [*module.named_parameters(), *module.named_buffers()]}
    follower = Follower(lambda: names, lambda name, tensor: names.get(id(tensor)) == name)

    def follow() -> Step:
        step = Step(follower, [given])
        with step.active():
            result = module(given)
        step.end()
        del result
        step.kept()
        return step

    for _ in range(4):
        step = follow()
    handed = HandedOut(follower.kinds)

    def hand_out() -> None:
        handed.at = 0
        with handed:
            module(given)
        handed.is_first = False

    hand_out()
    sides: list[Callable[[], Any]] = [lambda: module(given), hand_out, follow]
    seconds: list[list[float]] = [[] for _ in sides]
    for _ in range(rounds):
        for side, times in zip(sides, seconds, strict=True):
            begun = time.process_time()
            side()
            times.append(time.process_time() - begun)
    plain, least, followed = map(statistics.median, seconds)
    return len(step.notes), plain, least, followed


def modules() -> dict[str, tuple[nn.Module, Tensor]]:
    """Modules and what they are given; those of Hugging Face where it is installed."""
    torch.manual_seed(0)
    tokens = torch.randint(0, 64, (2, 16))
    mlp = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 32))
    found: dict[str, tuple[nn.Module, Tensor]] = {"MLP": (mlp, torch.randn(8, 64))}
    found["GPT, 12 layers"] = (GPT(64, 12, 4, 16, 0.0, tie_embeddings=True), tokens)
    try:
        import transformers
    except ImportError:
        return found
    small: dict[str, Any] = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 12, "num_attention_heads": 4}
    for name, config in {
        "GPT-2": transformers.GPT2Config(vocab_size=64, n_embd=64, n_layer=12, n_head=4, n_positions=64),
        "Llama": transformers.LlamaConfig(**small, intermediate_size=128),
        "BERT": transformers.BertConfig(**small, intermediate_size=128),
    }.items():
        found[name] = (transformers.AutoModel.from_config(config), tokens)
    return found


if __name__ == "__main__":
    main()
