"""Devices and links of one's own; mistakes name the place in the file and what is allowed."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_spmd.errors import ConfigurationError
from lightning_spmd.planning.hardware_file import read_hardware

GOOD = """
devices:
  ours: {like: h100, memory: 96e9, flops: {bf16: 800e12}, link: our-bus}
  h100: {bandwidth_share: 0.9}
links:
  our-bus: {bandwidth: 100e9, latency: 1e-6, start: 0}
"""


def _read(folder: Path, text: str) -> None:
    (folder / "hardware.yaml").write_text(text)
    read_hardware(str(folder / "hardware.yaml"))


def test_a_file_adds_to_the_table(tmp_path: Path) -> None:
    (tmp_path / "hardware.yaml").write_text(GOOD)
    found = read_hardware(str(tmp_path / "hardware.yaml"))
    ours, h100 = found.devices["ours"], found.devices["h100"]
    assert (ours.memory, ours.flops["bf16"], ours.link) == (96e9, 800e12, "our-bus")
    assert ours.flops["fp32"] == h100.flops["fp32"]
    assert (h100.bandwidth_share, h100.memory) == (0.9, 80e9)
    assert found.link("our-bus", "--between").bandwidth == 100e9


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("gpus: {}", ["no 'gpus'", "devices, links"]),
        ("devices: {ours: {like: h100, memroy: 1}}", ["devices.ours", "'memroy'", "Did you mean 'memory'?"]),
        ("devices: {ours: {like: h1000}}", ["devices.ours.like", "Did you mean 'h100'?"]),
        ("devices: {ours: {memory: 1e9}}", ["devices.ours", "bandwidth, flops, link missing"]),
        ("devices: {ours: {like: h100, memory: many}}", ["devices.ours.memory", "'many'", "above 0"]),
        ("devices: {ours: {like: h100, memory: -1}}", ["devices.ours.memory", "above 0"]),
        ("devices: {ours: {like: h100, memory: true}}", ["devices.ours.memory", "above 0"]),
        ("devices: {ours: {like: h100, flops: {fp8: 1}}}", ["devices.ours.flops", "'fp8'", "bf16, fp16"]),
        ("devices: {ours: {like: h100, flops: 3}}", ["devices.ours.flops", "keys and values"]),
        ("devices: {ours: {like: h100, flops_share: 2}}", ["devices.ours.flops_share", "at most 1"]),
        ("devices: {ours: {like: h100, link: string}}", ["devices.ours.link", "'string'", "nvlink4"]),
        ("devices: {ours: {like: h100, kind: tpu}}", ["devices.ours.kind", "cuda, cpu"]),
        ("links: {ours: {like: ethernet-1, per: rack}}", ["links.ours.per", "device, node"]),
        ("links: [1]", ["links", "keys and values"]),
        ("just words", ["keys and values"]),
        ("a: [", ["no YAML"]),
    ],
)
def test_a_mistake_names_its_place_and_what_is_allowed(tmp_path: Path, text: str, words: list[str]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        _read(tmp_path, text)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message
    if ":" in text and "[" not in text:
        assert "hardware.yaml" in message


def test_a_file_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigurationError, match="--hardware /nowhere.yaml"):
        read_hardware("/nowhere.yaml")
