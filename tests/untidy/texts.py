"""Text and output: printed, written to files, looked at, read back; the environment and clocks."""

from __future__ import annotations

import csv
import io
import json
import logging
import os
import re
import sys
import time
import warnings
import zlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.untidy.untidy import Untidy


class Printed(Untidy):
    """Each step prints its loss and the best one."""

    def __init__(self) -> None:
        super().__init__()
        self.history: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(*batch)
        self.history.append(round(loss.item(), 3))
        print(f"loss {loss.item():.4f}, best {min(self.history)}")
        return loss

    def kept(self) -> Any:
        return self.history


class TextCompared(Untidy):
    """A text of the loss is compared with a text; both ways are losses."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(*batch)
        return loss * 2 if f"{loss.item():.2f}" > "1.20" else loss


class PrintedAndCompared(Untidy):
    """A text in a variable is printed first and compared then."""

    limit = "1.20"

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(*batch)
        text = f"{loss.item():.2f}"
        print(text)
        return loss * 2 if text > self.limit else loss


class OwnInfo(Untidy):
    """The user's own info(text) looks at its text, and gives the alarm."""

    def __init__(self) -> None:
        super().__init__()
        self.alarms = 0

    def info(self, text: str) -> None:
        if "1." in text or text.endswith("9"):
            self.alarms += 1
        print(f"[{self.alarms}] {text}")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(*batch)
        self.info(f"step {batch_idx}: {loss.item():.3f}")
        return loss / (1 + 0.2 * self.alarms)

    def kept(self) -> Any:
        return self.alarms


LINES: list[str] = []


def info(text: str) -> bool:
    """Note a line; whether it is longer than the one before."""
    LINES.append(text)
    return len(LINES) > 1 and float(text.split()[-1]) > float(LINES[-2].split()[-1])


class InfoOfTheFile(Untidy):
    """A function of the file notes texts and answers by what is in them."""

    def __init__(self) -> None:
        super().__init__()
        LINES.clear()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(*batch)
        rising = info(f"step {batch_idx} has {loss.item():.4f}")
        return loss * 0.5 if rising else loss

    def kept(self) -> Any:
        return list(LINES)


class Collected(logging.Handler):
    """Collects messages."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.levelname} {record.getMessage()}")


class PythonLogging(Untidy):
    """Python's logging, with a handler of one's own whose number of lines is used."""

    def __init__(self) -> None:
        super().__init__()
        self.logging, self.handler = logging.Logger("untidy", logging.INFO), Collected()
        self.logging.addHandler(self.handler)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(*batch)
        self.logging.debug("hidden %s", loss)
        self.logging.info("step %d has loss %.3f", batch_idx, loss)
        if loss > 1.1:
            self.logging.warning("large: %s", f"{loss:.2f}")
        return loss * (1 + 0.01 * len(self.handler.lines))

    def kept(self) -> Any:
        return self.handler.lines


class FileWritten(Untidy):
    """A line goes to a file in each step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(*batch)
        with open("losses.txt", "a") as file:
            file.write(f"{batch_idx} {loss.item():.6f}\n")
        return loss

    def kept(self) -> Any:
        return Path("losses.txt").read_text()


class FileRead(Untidy):
    """A file says the weight of the loss; the step reads it and writes the next one."""

    def __init__(self) -> None:
        super().__init__()
        Path("weight.txt").write_text("1.0")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        weight = float(Path("weight.txt").read_text())
        Path("weight.txt").write_text(str(weight * 0.95))
        return self.loss(*batch) * weight

    def kept(self) -> Any:
        return Path("weight.txt").read_text()


class StopFile(Untidy):
    """A file that appears (here by the step itself) changes what later steps do; in the end it is removed."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(*batch)
        if batch_idx == 9:
            Path("slow").touch()
        if batch_idx == 18:
            os.remove("slow")
        return loss * 0.1 if os.path.exists("slow") else loss

    def kept(self) -> Any:
        return Path("slow").exists()


class JsonAndCsv(Untidy):
    """Records go to a file kept open, as JSON and as CSV; the settings are read from JSON again."""

    def __init__(self) -> None:
        super().__init__()
        self.text = io.StringIO()
        self.rows = csv.writer(self.text)
        self.settings = json.dumps({"scale": 1.0})

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        settings = json.loads(self.settings)
        loss = self.loss(*batch) * settings["scale"]
        self.rows.writerow([batch_idx, f"{loss.item():.5f}"])
        settings["scale"] = round(settings["scale"] * 0.96, 4)
        self.settings = json.dumps(settings)
        return loss

    def kept(self) -> Any:
        return self.text.getvalue(), self.settings


class SavedTensors(Untidy):
    """Every sixth step saves weights with torch.save; the step behind it loads them and pulls back to them."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(*batch)
        if batch_idx % 6 == 2:
            torch.save({"head": self.head.state_dict(), "step": batch_idx}, "weights.pt")
        if batch_idx % 6 == 3:
            loaded = torch.load("weights.pt")
            loss = loss + (self.head.weight - loaded["head"]["weight"]).square().sum() * loaded["step"]
        return loss

    def kept(self) -> Any:
        return torch.load("weights.pt")["head"]["bias"].tolist()


class StorageCopied(Untidy):
    """Every sixth step writes and copies bytes of a storage, as ``torch.save`` copies those of a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = torch.arange(12, dtype=torch.uint8).untyped_storage()
        self.sums: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(*batch)
        if batch_idx % 6 == 2:
            self.bytes[3] = batch_idx
            self.sums.append(sum(self.bytes.clone()) + self.bytes[0])
        return loss * (1 + 0.01 * len(self.sums))

    def kept(self) -> Any:
        return self.sums


class Environment(Untidy):
    """os.environ is read, decided by and changed."""

    def __init__(self) -> None:
        super().__init__()
        os.environ["UNTIDY_SCALE"] = "1.0"
        os.environ.pop("UNTIDY_DEBUG", None)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(*batch) * float(os.environ["UNTIDY_SCALE"])
        os.environ["UNTIDY_SCALE"] = str(float(os.environ["UNTIDY_SCALE"]) * 0.97)
        if batch_idx == 10:
            os.environ["UNTIDY_DEBUG"] = "1"
        if os.environ.get("UNTIDY_DEBUG"):
            print("debug", batch_idx)
            loss = loss + 0.01 * self.head.weight.square().sum()
        return loss

    def kept(self) -> Any:
        return os.environ["UNTIDY_SCALE"], "UNTIDY_DEBUG" in os.environ


class Clocks(Untidy):
    """Each step notes the time; a clock that stood still, or ran twice, would be seen."""

    def __init__(self) -> None:
        super().__init__()
        self.times: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        begun = time.perf_counter()
        loss = self.loss(*batch)
        self.times += [begun, time.perf_counter()]
        rising = all(a < b for a, b in zip(self.times, self.times[1:], strict=False))
        return loss * (1 + 0.01 * len(self.times)) if rising else loss * 0

    def kept(self) -> Any:
        return len(self.times), self.times == sorted(set(self.times))


class OnceASecond(Untidy):
    """What is to happen at most once an hour happens once, by the clock."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.shown = -1e9, 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(*batch)
        if time.monotonic() - self.last > 3600:
            self.last, self.shown = time.monotonic(), self.shown + 1
            print(f"step {batch_idx}, loss {loss:.3f}")
        return loss / (1 + self.shown)

    def kept(self) -> Any:
        return self.shown


class Streams(Untidy):
    """sys.stdout is written to and flushed, a file of one's own printed into, a line ended by a return."""

    def __init__(self) -> None:
        super().__init__()
        self.own = io.StringIO()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(*batch)
        sys.stdout.write(f"{batch_idx}: ")
        sys.stdout.flush()
        print("%.3f" % loss, "{:>8.4f}".format(loss.item()), sep=" | ", end="\r\n")  # noqa: UP031, UP032
        print(batch_idx, loss.item() > 1, file=self.own)
        return loss * (1 + self.own.tell() / 1000)

    def kept(self) -> Any:
        return self.own.getvalue()


class TensorsAsText(Untidy):
    """Tensors themselves are printed, and their text kept and cut."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        h = self.hidden(batch[0])
        loss = torch.nn.functional.cross_entropy(self.head(h), batch[1])
        self.texts.append(str(h[0, :3].detach()))
        print(loss, f"{loss}", repr(batch[1][:4]), f"{self.head.bias!r:.30}")
        return loss * 0.5 if "0.0000" in self.texts[-1] else loss

    def kept(self) -> Any:
        return self.texts


class WarnsAndListens(Untidy):
    """A warning with a value in its text is caught by the step, and its text read."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[str] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(*batch)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if loss > 1.1:
                warnings.warn(f"loss is {loss:.2f}", stacklevel=1)
        self.heard += [str(warning.message) for warning in caught]
        return loss * 0.7 if caught else loss

    def kept(self) -> Any:
        return self.heard


class TextParsed(Untidy):
    """A number goes through a text and back: rounded, found by a pattern, hashed."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(*batch)
        text = f"loss={loss.item():.3f} step={batch_idx}"
        found = re.search(r"loss=(\d+)\.(\d)", text)
        assert found is not None
        weight = float(text[5:10]) + int(found[2]) / 10
        return loss * weight if zlib.crc32(text.encode()) % 3 else loss


CASES = (
    Printed,
    TextCompared,
    PrintedAndCompared,
    OwnInfo,
    InfoOfTheFile,
    PythonLogging,
    FileWritten,
    FileRead,
    StopFile,
    JsonAndCsv,
    SavedTensors,
    StorageCopied,
    Environment,
    Clocks,
    OnceASecond,
    Streams,
    TensorsAsText,
    WarnsAndListens,
    TextParsed,
)
