"""Numbers that the Trainer accepts but that make no sense: refused with the key and what is allowed.

``accumulate_grad_batches: 0`` ends in a division by zero, ``max_epochs: -3`` trains nothing, and
``gradient_clip_val: -1`` reverses all gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


def _at_least(least: int, or_else: str = "") -> tuple[Callable[[Any], bool], str]:
    return (lambda value: value >= least), f"a whole number of at least {least}{or_else}"


def _share_or_count(value: Any) -> bool:
    return 0 <= value <= 1 if isinstance(value, float) else value >= 0


_COUNT = (_share_or_count, "a whole number of batches, or a share of them between 0.0 and 1.0")
_ALLOWED: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "accumulate_grad_batches": _at_least(1),
    "check_val_every_n_epoch": _at_least(1),
    "gradient_clip_val": (lambda value: value >= 0, "a number of at least 0, or null"),
    "limit_predict_batches": _COUNT,
    "limit_test_batches": _COUNT,
    "limit_train_batches": _COUNT,
    "limit_val_batches": _COUNT,
    "log_every_n_steps": _at_least(0),
    "max_epochs": _at_least(-1, ", where -1 is without end"),
    "max_steps": _at_least(-1, ", where -1 is without end"),
    "min_epochs": _at_least(0),
    "min_steps": _at_least(0),
    "num_nodes": _at_least(1),
    "num_sanity_val_steps": _at_least(-1, ", where -1 is all of them"),
    "overfit_batches": _COUNT,
    "reload_dataloaders_every_n_epochs": _at_least(0),
    "val_check_interval": (
        lambda value: 0 < value <= 1 if isinstance(value, float) else value >= 1,
        "a whole number of batches of at least 1, or a share of an epoch above 0.0 and up to 1.0",
    ),
}


def wrong_value(trainer: Mapping[str, Any]) -> str | None:
    """The first value of the Trainer that is out of range, with what is allowed; None if there is none.

    Args:
        trainer: values by key, already of the Trainer's types.
    """
    for key, (allowed, words) in _ALLOWED.items():
        value = trainer.get(key)
        if isinstance(value, int | float) and not isinstance(value, bool) and not allowed(value):
            return f"trainer.{key}: {value} is not what it takes: {words}"
    return _wrong_devices(trainer.get("devices"))


def _wrong_devices(devices: Any) -> str | None:
    text = str(devices).strip()
    if isinstance(devices, list) or text in ("auto", "-1") or "," in text:
        return None
    if text.isdigit() and int(text) > 0:
        return None
    return f"trainer.devices: {text} is not what it takes: a whole number of at least 1, a list of devices, auto"


def wrong_seed(seed: Any) -> str | None:
    """What is wrong with ``seed_everything``, which Lightning checks only when it seeds; None if nothing is."""
    if seed is None or isinstance(seed, bool) or 0 <= int(seed) < 2**32:
        return None
    return f"seed_everything: {seed} is not what it takes: a whole number from 0 to {2**32 - 1}, or true, false"
