"""Lists that a step draws from Python's ``random``: ``sample``, ``choices``, ``shuffle``; and ``choice``.

    chosen = random.sample(range(len(x)), 4)        four inputs of the graph
    x[chosen]                                        an index made of them

Of numbers the drawn ones are inputs. Of other things their positions are: which of them is meant is a decision.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lightning_spmd.stages.capture.host_scalar import HostScalar, Number, scalar_of

Drawing = Callable[..., Any]
"""Draws with a function that is given arguments: ``(name, function, args, kwargs)``."""


def of_lists(draw: Drawing, plain: Callable[[str], Callable[..., Any]], randrange: Any) -> Mapping[str, Any]:
    """What stands for these functions of a generator, by name.

    Args:
        draw: records a draw.
        plain: gives the generator's own function of a name, whenever it is asked.
        randrange: draws a position.
    """

    def chosen(name: str, population: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(population, (list, tuple, range, str)) or kwargs.get("counts") is not None:
            return plain(name)(population, *args, **kwargs)

        def drawn(items: Sequence[Any], *more: Any, **named: Any) -> list[Any]:
            return plain(name)(items, *more, **named)

        if _are_numbers(population):
            return draw(name, drawn, (list(population), *args), kwargs)
        positions = draw(name, drawn, (list(range(len(population))), *args), kwargs)
        return [_item(population, position) for position in positions]

    def sample(population: Any, *args: Any, **kwargs: Any) -> Any:
        return chosen("sample", population, *args, **kwargs)

    def choices(population: Any, *args: Any, **kwargs: Any) -> Any:
        return chosen("choices", population, *args, **kwargs)

    def shuffle(items: Any) -> None:
        if type(items) is not list:
            return plain("shuffle")(items)

        def drawn(before: Sequence[Any]) -> list[Any]:
            after = list(before)
            plain("shuffle")(after)
            return after

        if _are_numbers(items):
            items[:] = draw("shuffle", drawn, (list(items),), {})
        else:
            positions = draw("shuffle", drawn, (list(range(len(items))),), {})
            items[:] = [_item(items, position) for position in positions]
        return None

    def choice(items: Sequence[Any]) -> Any:
        if isinstance(items, (list, tuple, range)) and _are_numbers(items):
            return draw("choice", lambda those: plain("choice")(those), (list(items),), {})
        return items[randrange(len(items))] if len(items) else plain("choice")(items)  # which draws as randrange does

    return {"sample": sample, "choices": choices, "shuffle": shuffle, "choice": choice}


def _item(items: Sequence[Any], position: Any) -> Any:
    """What is at a drawn position; of recorded numbers one that is recorded, for which nothing is decided."""
    where, numbers = scalar_of(position), [scalar_of(item) for item in items]
    kinds = {type(item if number is None else number.sample) for number, item in zip(numbers, items, strict=True)}
    if where is None or not any(numbers) or kinds not in ({int}, {float}):
        return items[position]
    operands = [number or HostScalar(item, None, where.recorder) for number, item in zip(numbers, items, strict=True)]
    return where.recorder.scalar_call(_picked, (where, *operands)).as_symbol()


def _picked(position: int, *items: Number) -> Number:
    return items[position]


def _are_numbers(items: Sequence[Any]) -> bool:
    """Whether they are plain numbers of one type."""
    return len(items) > 0 and set(map(type, items)) in ({int}, {float})
