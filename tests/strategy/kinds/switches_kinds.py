"""Torch's switches."""

from typing import Any

import torch
from torch.nn import functional as F

from tests.strategy.kinds.base_kinds import Config, Kind


class DefaultDtype(Kind):
    def start(self) -> None:
        pass

    def read(self) -> Any:
        return float(torch.ones(1).element_size())

    def write(self, value: float) -> None:
        torch.set_default_dtype(torch.float64 if value == 0.5 else torch.float32)

    def on_train_end(self) -> None:
        torch.set_default_dtype(torch.float32)


class Deterministic(Kind):
    def start(self) -> None:
        pass

    def read(self) -> Any:
        return 2.0 if torch.are_deterministic_algorithms_enabled() else 1.0

    def write(self, value: float) -> None:
        torch.use_deterministic_algorithms(value == 0.5)

    def on_train_end(self) -> None:
        torch.use_deterministic_algorithms(False)


class Backends(Kind):
    def start(self) -> None:
        pass

    def read(self) -> Any:
        return 2.0 if torch.backends.cudnn.benchmark else 1.0

    def write(self, value: float) -> None:
        torch.backends.cudnn.benchmark = value == 0.5

    def on_train_end(self) -> None:
        torch.backends.cudnn.benchmark = False


class BackendsByName(Backends):
    def read(self) -> Any:
        import torch.backends.cudnn as switches

        return 2.0 if switches.benchmark or torch.backends.mkldnn.deterministic else 1.0

    def write(self, value: float) -> None:
        torch.backends.cudnn.benchmark = value == 0.5
        torch.backends.mkldnn.deterministic = value == 1.5

    def on_train_end(self) -> None:
        self.write(1.0)


class Sdp(Kind):
    def start(self) -> None:
        pass

    def read(self) -> Any:
        return 2.0 if torch.backends.cuda.flash_sdp_enabled() else 1.0

    def write(self, value: float) -> None:
        torch.backends.cuda.enable_flash_sdp(value != 0.5)

    def on_train_end(self) -> None:
        torch.backends.cuda.enable_flash_sdp(True)


class FastPath(Sdp):
    def read(self) -> Any:
        return 2.0 if torch.backends.mha.get_fastpath_enabled() else 1.0

    def write(self, value: float) -> None:
        torch.backends.mha.set_fastpath_enabled(value != 0.5)

    def on_train_end(self) -> None:
        torch.backends.mha.set_fastpath_enabled(True)


class MatmulPrecision(Kind):
    def start(self) -> None:
        pass

    def read(self) -> Any:
        return 2.0 if torch.get_float32_matmul_precision() == "high" else 1.0

    def write(self, value: float) -> None:
        torch.set_float32_matmul_precision("high" if value == 0.5 else "highest")

    def on_train_end(self) -> None:
        torch.set_float32_matmul_precision("highest")


class Anomaly(Kind):
    """Autograd looks for NaNs then, which no graph can."""

    def start(self) -> None:
        pass

    def read(self) -> Any:
        return 2.0 if torch.is_anomaly_enabled() else 1.0

    def write(self, value: float) -> None:
        torch.autograd.set_detect_anomaly(value == 0.5)

    def on_train_end(self) -> None:
        torch.autograd.set_detect_anomaly(False)


class Threads(Kind):
    def start(self) -> None:
        self.threads = torch.get_num_threads()

    def read(self) -> Any:
        return float(torch.get_num_threads())

    def write(self, value: float) -> None:
        torch.set_num_threads(2 if value == 0.5 else 1)

    def on_train_end(self) -> None:
        torch.set_num_threads(self.threads)


class Attention(Kind):
    """Which kernel attention takes."""

    def start(self) -> None:
        pass

    def read(self) -> Any:
        q = torch.linspace(-1, 1, 2 * 4 * 8).reshape(1, 2, 4, 8)
        return F.scaled_dot_product_attention(q, q, q).mean() + 1.0

    def write(self, value: float) -> None:
        torch.backends.cuda.enable_flash_sdp(value != 0.5)

    def on_train_end(self) -> None:
        torch.backends.cuda.enable_flash_sdp(True)


class Autocast(Kind):
    """Switched on and off around the step."""

    tolerance = 1e-2  # bfloat16

    def start(self) -> None:
        self.context: Any = None

    def read(self) -> Any:
        return 2.0 if torch.is_autocast_enabled("cpu") else 1.0

    def write(self, value: float) -> None:
        self.on_train_end()
        if value == 0.5:
            self.context = torch.autocast("cpu", torch.bfloat16, cache_enabled=False)
            self.context.__enter__()

    def on_train_end(self) -> None:
        if self.context is not None:
            self.context.__exit__(None, None, None)
        self.context = None


class AutocastFlag(Kind):
    """An autocast region inside the step that an attribute switches."""

    def start(self) -> None:
        self.crit = Config(True)

    def read(self) -> Any:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.crit.value):
            return (torch.ones(2, 2) * 1.001 @ torch.ones(2, 2)).mean().float()

    def write(self, value: float) -> None:
        self.crit.value = value != 0.5


class GradientFlag(Kind):
    """A part of the step without gradients, as an attribute says."""

    def start(self) -> None:
        self.crit = Config(True)

    def read(self) -> Any:
        with torch.set_grad_enabled(self.crit.value):
            return 1.0 + self.layer.weight.square().mean()

    def write(self, value: float) -> None:
        self.crit.value = value != 0.5
