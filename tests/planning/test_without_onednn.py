"""What is switched while a step is traced comes back, and nobody is warned of it."""

from __future__ import annotations

import warnings

import pytest
import torch

from lightning_spmd.planning.capturing import without_onednn


def _fail() -> None:
    assert not torch.backends.mkldnn.enabled
    raise ValueError("inside")


@pytest.mark.parametrize("enabled", [True, False])
def test_onednn_is_off_inside_and_as_before_outside_without_a_warning(
    enabled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", enabled)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ValueError, match="inside"), without_onednn():
            _fail()
    assert torch.backends.mkldnn.enabled == enabled
