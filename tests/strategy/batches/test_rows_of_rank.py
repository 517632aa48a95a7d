"""What counts this rank's rows in a batch and is no tensor of rows: a step that looks at it is no graph."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_spmd.errors import CaptureError
from lightning_spmd.ir.tree import leaves
from lightning_spmd.stages.capture.batch.batch import Batch
from lightning_spmd.stages.capture.batch.rows_of_rank import lists_of_tensors
from lightning_spmd.stages.capture.follow.placeholders import Moulds
from lightning_spmd.stages.capture.follow.tripwires import Tripwires
from lightning_spmd.strategy.steps.meeting import for_all_ranks
from tests.helpers.ranks import RankPool
from tests.helpers.training import QUIET, Result, fit
from tests.strategy.evaluations import InGraphs
from tests.strategy.small import Quiet, rows

ROWS = 4
"""A rank's."""


@dataclass
class Extras:
    names: Any


def collate(items: list[Any]) -> dict[str, Any]:
    """A batch with everything in it that can count its rows."""
    x, y = torch.stack([i[0] for i in items]), torch.stack([i[1] for i in items])
    names = [f"file{float(v):.3f}" for v in x[:, 0]]
    return {
        "x": x,
        "y": y,
        "views": [x, x + 1],
        "names": names,
        "nested": (1.5, [tuple(names)]),
        "extras": Extras(names[:]),
        "dicts": [{"size": 2, "name": n} for n in names],
        "scalars": list(x[:, 0].unbind()),
        "count": len(items),
        "tensor count": torch.tensor(float(len(items))),
        "others": ["a", "b", "c"],
        "scale": 0.5,
    }


LOOKS: dict[str, Callable[[Any], Any]] = {
    "length": lambda b: len(b["names"]),
    "iteration": lambda b: list(b["names"]),
    "index": lambda b: b["names"][0],
    "truth": lambda b: 1 if b["names"] else 0,
    "equality": lambda b: b["names"] == ["a"],
    "unpacking": lambda b: [*b["names"]],
    "sorting": lambda b: sorted(b["names"]),
    "reversing": lambda b: list(reversed(b["names"])),
    "copying": lambda b: copy.copy(b["names"]),
    "joining": lambda b: "".join(b["names"]),
    "JSON": lambda b: json.dumps(b["names"]),
    "kind": lambda b: isinstance(b["names"], list),
    "adding": lambda b: b["names"] + ["a"],
    "repeating": lambda b: b["names"] * 2,
    "finding": lambda b: "a" in b["names"],
    "appending": lambda b: b["names"].append("a"),
    "assigning": lambda b: b["names"].__setitem__(0, "a"),
    "tuple": lambda b: len(b["nested"][1][0]),
    "dataclass": lambda b: len(b["extras"].names),
    "dictionaries": lambda b: [d["size"] for d in b["dicts"]],
    "tensors": lambda b: torch.stack(b["scalars"]),
    "count": lambda b: 1.0 / b["count"],
    "count as an index": lambda b: range(b["count"]),
    "rounded count": lambda b: round(b["count"]),
    "count of steps": lambda b: divmod(b["count"], 3),
}


def _told(what: str, place: str | None) -> NoReturn:
    raise CaptureError(what, place)


def _parts(batch: Any, *, part: bool) -> tuple[Any, Tripwires]:
    wires = Tripwires(_told)
    return for_all_ranks(Batch(batch, part=part), 2 * ROWS, wires, Moulds())[0], wires


@pytest.mark.parametrize("look", LOOKS)
def test_any_look_is_told(look: str) -> None:
    seen, wires = _parts(collate(rows(ROWS)), part=True)
    with pytest.raises(CaptureError, match=r"training_step (looks at|reads) batch.*x\.shape\[0\]"), wires.watched():
        LOOKS[look](seen)


@pytest.mark.parametrize("look", [look for look in LOOKS if look not in ("JSON", "tensors")])
def test_once_the_step_is_over_what_stands_for_a_value_does_what_it_does(look: str) -> None:
    batch = collate(rows(ROWS))
    seen, wires = _parts(batch, part=True)
    wires.is_over = True
    found, expected = LOOKS[look](seen), LOOKS[look](batch)
    assert repr(found) == repr(expected)


@pytest.mark.parametrize("look", LOOKS)
def test_where_one_rank_has_all_rows_nothing_is_told(look: str) -> None:
    seen, wires = _parts(collate(rows(ROWS)), part=False)
    with wires.watched():
        LOOKS[look](seen)


def test_what_does_not_count_rows_may_be_looked_at() -> None:
    seen, _ = _parts(collate(rows(ROWS)), part=True)
    assert (len(seen["others"]), len(seen["views"]), seen["views"][0].shape) == (3, 2, (8, 6))
    assert float(seen["scale"]) == 0.5
    x, y = _parts(list(torch.ones(2, 2, 3)), part=True)[0]  # a list of two things, and two rows
    assert x.shape == y.shape == (8, 3)


def test_what_nobody_knows_is_not_looked_at() -> None:
    seen, _ = _parts({"x": torch.ones(4, 2), "bag": {1, 2}, "kind": float, "dtype": torch.float32}, part=True)
    assert (seen["kind"], seen["dtype"]) == (float, torch.float32)
    with pytest.raises(CaptureError, match=r"looks at batch\['bag'\], a set, which may hold rows"):
        len(seen["bag"])


def test_tensors_in_a_list_of_rows_are_no_tensors_of_the_batch() -> None:
    """Each rank's are its own: nobody compares them, and no graph has them as inputs."""
    batch = Batch(collate(rows(ROWS)), part=True)
    assert [batch.paths[i] for i in batch.tensors] == [
        "['x']",
        "['y']",
        "['views'][0]",
        "['views'][1]",
        "['tensor count']",
    ]
    assert len(Batch(batch.tree).tensors) == len(batch.tensors) + ROWS
    assert len(leaves(batch.tree)) == len(batch.values)


def test_lists_of_as_many_tensors_as_rows_are_doubtful() -> None:
    points, x = list(torch.zeros(2, 2)), torch.zeros(2, 3)
    assert lists_of_tensors({"x": x, "points": points, "pair": (x, points[0])}, 2) == ["['points']"]
    assert lists_of_tensors([x, x + 1], 2) == []  # inputs and targets
    assert lists_of_tensors({"x": torch.zeros(1, 3), "one": [torch.zeros(1, 2)]}, 1) == []


class Counts(Quiet):
    """Divides a sum by what a batch says of its rows."""

    look: Callable[[Any], Any] = staticmethod(lambda _: 1.0)

    def loss(self, batch: Any) -> Tensor:
        return super().loss((batch["x"], batch["y"])) / type(self).look(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), batch_size=4)


def _caught(batch: Any) -> float:
    try:
        return float(len(batch["names"]))
    except Exception:
        return 1.0


STEPS: dict[str, Callable[[Any], Any]] = {
    "list": LOOKS["length"],
    "caught": _caught,
    "number": lambda b: b["count"],
    "tensor": lambda b: b["tensor count"],
}


def _loader(strategy: str) -> DataLoader[Any]:
    ranks = 2 if strategy == "spmd" else 1
    rank = torch.distributed.get_rank() if ranks > 1 else 0
    data = [row for i, row in enumerate(rows(2 * ranks * ROWS)) if i % ranks == rank]
    return DataLoader(data, batch_size=ROWS, collate_fn=collate)  # type: ignore[arg-type]


class Data(L.LightningDataModule):
    def __init__(self, strategy: str = "spmd") -> None:
        super().__init__()
        self.strategy = strategy

    def train_dataloader(self) -> Any:
        return _loader(self.strategy)

    val_dataloader = train_dataloader


def _modes() -> list[tuple[str, str, list[str]]]:
    found = []
    for name, look in STEPS.items():
        module = type("Counting", (Counts,), {"look": staticmethod(look)})()
        result = fit(module, Data(), {"batch": "global"}, 2, max_steps=1)[0]
        found.append((name, result.mode, result.warnings))
    return found


def test_a_step_that_looks_trains_eagerly_and_says_where_it_looked(two_ranks: RankPool) -> None:
    everyone = two_ranks.run(_modes)
    for (name, mode, texts), (_, other, _) in zip(*everyone, strict=True):
        assert (mode, other) == ("eager", "eager"), name
        said = [w for w in texts if "trains eagerly" in w]
        assert len(said) == 1, (name, texts)
        for part in ("training_step", "batch['", "of this rank's", "x.shape[0]", "test_rows_of_rank.py:"):
            assert part.replace("of this", "this") in said[0], (name, said)


class HandsOn(Counts):
    """Looks at nothing that counts rows, and hands lists on."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch) * batch["scale"] * len(batch["others"]) + batch["views"][0].sum() * 0
        return {"loss": loss, **{key: batch[key] for key in ("names", "scalars", "dicts", "nested", "count")}}


class Keeps(L.Callback):
    """Compares what callbacks get with what was in the batch."""

    def __init__(self) -> None:
        self.same: list[bool] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        scalars = zip(outputs["scalars"], batch["scalars"], strict=True)
        plain = all(outputs[key] == batch[key] for key in ("names", "dicts", "nested", "count"))
        self.same.append(plain and all(a is b for a, b in scalars))


def _hands_on() -> tuple[Result, list[bool]]:
    keeps = Keeps()
    return fit(HandsOn(), Data(), "spmd", 2, [keeps], max_steps=3)[0], keeps.same


def test_what_nobody_looks_at_costs_nothing_and_arrives(two_ranks: RankPool) -> None:
    for result, same in two_ranks.run(_hands_on):
        assert (result.mode, result.captures, same) == ("compiled", 2, [True] * 3)
        assert not [w for w in result.warnings if "batch" in w and "spmd" in w]


def _validate() -> list[str]:
    module = type("Counting", (Counts,), {"look": staticmethod(LOOKS["length"])})()
    trainer = L.Trainer(strategy=InGraphs(), devices=2, use_distributed_sampler=False, **QUIET)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.validate(module, Data(), verbose=False)
    return [str(w.message) for w in caught]


def test_a_validation_step_that_looks_runs_eagerly(two_ranks: RankPool) -> None:
    said = [w for w in two_ranks.run(_validate)[0] if "runs validation_step eagerly" in w]
    assert len(said) == 1
    assert "validation_step looks at batch['names']" in said[0]
    assert "test_rows_of_rank.py:" in said[0]
