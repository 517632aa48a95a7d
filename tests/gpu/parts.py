"""What the GPU script does, part by part. Nothing here imports torch: the script itself stays light."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """One process of the script.

    Args:
        name: for ``--parts`` and the tables.
        kind: ``"peak"``, ``"correctness"`` or ``"benchmark"``. Correctness decides the exit status, and its parts run
            side by side; the others have the GPU to themselves.
        function: ``module:function`` inside ``tests.gpu``, called with a ``Setting`` and ``argument``.
        argument: what tells parts of one function apart.
        limit: seconds after which it is killed.
        least: seconds below which it is not begun.
    """

    name: str
    kind: str
    function: str
    argument: str = ""
    limit: float = 120.0
    least: float = 20.0


PARTS: tuple[Part, ...] = (
    Part("peak", "peak", "peak:measure", limit=60),
    Part("main_job", "correctness", "correctness:equals_eager", "main_job"),
    Part("gpt", "correctness", "correctness:equals_eager", "gpt"),
    Part("llama", "correctness", "correctness:equals_eager", "llama"),
    Part("vit", "correctness", "correctness:equals_eager", "vit"),
    Part("t5", "correctness", "correctness:equals_eager", "t5"),
    Part("conv", "correctness", "correctness:equals_eager", "conv"),
    Part("transformers_t5", "correctness", "correctness:equals_eager", "transformers_t5"),
    Part("flags", "correctness", "correctness:flags_equal_eager", "gpt"),
    Part("two_ranks", "correctness", "two_ranks:equal_one_device"),
    *(Part(f"untidy_{i}", "correctness", "untidy:same_as_eager", f"{i}/3", limit=150) for i in range(3)),
    Part("small", "benchmark", "benchmark:compare", "small", limit=120, least=45),
    Part("gpt2_124m", "benchmark", "benchmark:compare", "gpt2_124m", limit=180, least=60),
    Part("gpt2_350m", "benchmark", "benchmark:compare", "gpt2_350m", limit=240, least=75),
)


def chosen(names: str | None) -> list[Part]:
    """The parts of that comma-separated list, in the script's order; None: all.

    Raises:
        ValueError: a name is unknown.
    """
    if names is None:
        return list(PARTS)
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    known = [part.name for part in PARTS] + ["correctness", "benchmark"]
    for name in wanted:
        if name not in known:
            raise ValueError(f"--parts {name!r}: known are {', '.join(known)}")
    return [part for part in PARTS if part.name in wanted or part.kind in wanted]
