"""Devices and links by name, as data: what their makers say, and the share of it that programs reach.

Bandwidths are in bytes a second and in one direction. ``source`` says where a number is from. The shares are rules of
thumb and no measurement; a file given to ``lightning-spmd plan --hardware`` replaces any number, and ``--calibrate``
measures those of this machine's CPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from lightning_spmd.cost.collectives import Kind, wire_bytes
from lightning_spmd.cost.operators import Work

_ON_HOPPER = 0.35
"""FlashAttention-2, which torch has, reaches 35 % of an H100 (arXiv:2407.08608), 50 to 73 % of an A100 (2307.08691)."""
GB, GIB, TERA = 1e9, float(1 << 30), 1e12


@dataclass(frozen=True)
class DeviceType:
    """A kind of device.

    Args:
        name: in tables.
        memory: bytes.
        bandwidth: of its memory.
        flops: of dense products a second, by dtype: ``"bf16"``, ``"fp16"``, ``"tf32"``, ``"fp32"``, ``"fp64"``.
        link: name of the link within a node.
        reserved: bytes that are gone before the first tensor: context, libraries, communication buffers.
        flops_share: of ``flops``, what large products reach.
        bandwidth_share: of ``bandwidth``, what kernels reach.
        attention_share: of ``flops``, what the products in attention kernels reach.
        convolution_share: of ``flops``, what convolutions reach.
        curve_share: of ``bandwidth``, what functions such as GELU and softmax reach.
        reduction_share: of ``bandwidth``, what sums and norms reach.
        launch: seconds from one operator to the next if the device is done at once.
        kind: for which the package decides: ``"cuda"`` or ``"cpu"``.
        source: of the numbers.
    """

    name: str
    memory: float
    bandwidth: float
    flops: Mapping[str, float]
    link: str
    reserved: float = 1.5 * GIB
    flops_share: float = 0.7
    bandwidth_share: float = 0.8
    attention_share: float = 0.5
    convolution_share: float = 0.7
    curve_share: float = 0.8
    reduction_share: float = 0.8
    launch: float = 5e-6
    kind: str = "cuda"
    source: str = ""

    def seconds(self, work: Work) -> float:
        """Time of an operator: its arithmetic or its traffic, whichever takes longer."""
        reached = {"curve": self.curve_share, "reduction": self.reduction_share}
        moving = work.bytes / (self.bandwidth * reached.get(work.kind, self.bandwidth_share))
        if not work.flops:
            return moving
        shares = {"attention": self.attention_share, "convolution": self.convolution_share}
        return max(moving, work.flops / (shares.get(work.kind, self.flops_share) * self.peak(work.dtype)))

    def peak(self, dtype: torch.dtype) -> float:
        """Operations a second by the maker; a dtype without units of its own runs as fp32."""
        names = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64", torch.float32: "fp32"}
        name = names.get(dtype, "fp32")
        if name == "fp32" and torch.get_float32_matmul_precision() != "highest" and "tf32" in self.flops:
            name = "tf32"
        return self.flops.get(name, self.flops["fp32"])


@dataclass(frozen=True)
class LinkType:
    """A kind of link between devices.

    Args:
        name: in tables.
        bandwidth: of one adapter, in one direction.
        latency: seconds of a hop.
        start: seconds that a collective takes before the first hop.
        per: who has an adapter of its own: each ``"device"``, or each ``"node"``, whose devices share it.
        share: of ``bandwidth``, what collectives reach.
        core: seconds of computing for which there is no core in each second of a collective, where cores are devices.
        source: of the numbers.
    """

    name: str
    bandwidth: float
    latency: float
    start: float
    per: str = "device"
    share: float = 0.8
    core: float = 0.0
    source: str = ""


_HOPPER = {"bf16": 989.4 * TERA, "fp16": 989.4 * TERA, "tf32": 494.7 * TERA, "fp32": 66.9 * TERA, "fp64": 66.9 * TERA}
_AMPERE = {"bf16": 312 * TERA, "fp16": 312 * TERA, "tf32": 156 * TERA, "fp32": 19.5 * TERA, "fp64": 19.5 * TERA}

DEVICES: dict[str, DeviceType] = {
    d.name: d
    for d in (
        DeviceType(
            "h100", 80 * GB, 3350 * GB, _HOPPER, "nvlink4", attention_share=_ON_HOPPER,
            source="NVIDIA H100 data sheet, SXM5, dense",
        ),
        DeviceType(
            "h200", 141 * GB, 4800 * GB, _HOPPER, "nvlink4", attention_share=_ON_HOPPER,
            source="NVIDIA H200 data sheet, SXM, dense",
        ),
        DeviceType("a100-40", 40 * GB, 1555 * GB, _AMPERE, "nvlink3", source="NVIDIA A100 data sheet, SXM4 40 GB"),
        DeviceType("a100-80", 80 * GB, 2039 * GB, _AMPERE, "nvlink3", source="NVIDIA A100 data sheet, SXM4 80 GB"),
        DeviceType(
            "l40s", 48 * GB, 864 * GB,
            {"bf16": 362 * TERA, "fp16": 362 * TERA, "tf32": 183 * TERA, "fp32": 91.6 * TERA, "fp64": 1.4 * TERA},
            "pcie4", source="NVIDIA L40S data sheet, dense",
        ),
        DeviceType(
            "b200", 180 * GB, 8000 * GB,
            {"bf16": 2250 * TERA, "fp16": 2250 * TERA, "tf32": 1125 * TERA, "fp32": 75 * TERA, "fp64": 37 * TERA},
            "nvlink5", attention_share=_ON_HOPPER,
            source="NVIDIA DGX B200 and HGX B200 data sheets, an eighth of the node, dense",
        ),
        DeviceType(
            "v100", 32 * GB, 900 * GB, {"fp16": 125 * TERA, "fp32": 15.7 * TERA, "fp64": 7.8 * TERA},
            "nvlink2", source="NVIDIA V100 data sheet, SXM2 32 GB; no bf16 units",
        ),
        DeviceType(
            "cpu", 16 * GB, 20 * GB, {"fp32": 100e9, "fp64": 50e9, "bf16": 100e9, "fp16": 25e9},
            "loopback", reserved=0.3 * GIB, kind="cpu", attention_share=0.2, curve_share=0.3,
            convolution_share=0.5, reduction_share=0.4,
            source="an assumption for a few cores: calibrate it (--calibrate) or give a --hardware file",
        ),
    )
}  # fmt: skip

LINKS: dict[str, LinkType] = {
    link.name: link
    for link in (
        LinkType("nvlink5", 900 * GB, 2e-6, 10e-6, source="NVIDIA DGX B200 data sheet: 1.8 TB/s in both directions"),
        LinkType("nvlink4", 450 * GB, 2e-6, 10e-6, source="NVIDIA H100 data sheet: 900 GB/s in both directions"),
        LinkType("nvlink3", 300 * GB, 2e-6, 10e-6, source="NVIDIA A100 data sheet: 600 GB/s in both directions"),
        LinkType("nvlink2", 150 * GB, 2e-6, 10e-6, source="NVIDIA V100 data sheet: 300 GB/s in both directions"),
        LinkType("pcie5", 64 * GB, 4e-6, 10e-6, source="PCI Express 5.0, 16 lanes, 32 GT/s"),
        LinkType("pcie4", 32 * GB, 4e-6, 10e-6, source="PCI Express 4.0, 16 lanes, 16 GT/s"),
        LinkType("infiniband-ndr", 50 * GB, 5e-6, 20e-6, source="400 Gbit/s, an adapter each device (DGX H100)"),
        LinkType("infiniband-hdr", 25 * GB, 5e-6, 20e-6, source="200 Gbit/s, an adapter each device (DGX A100)"),
        LinkType("ethernet-100", 12.5 * GB, 20e-6, 30e-6, "node", source="100 Gbit/s, an adapter each node"),
        LinkType("ethernet-25", 3.125 * GB, 30e-6, 50e-6, "node", source="25 Gbit/s, an adapter each node"),
        LinkType("ethernet-10", 1.25 * GB, 30e-6, 100e-6, "node", source="10 Gbit/s, an adapter each node"),
        LinkType("ethernet-1", 0.125 * GB, 50e-6, 150e-6, "node", source="1 Gbit/s, an adapter each node"),
        LinkType("loopback", 1.5 * GB, 20e-6, 150e-6, source="processes of one host over gloo, an assumption"),
    )
}


@dataclass(frozen=True)
class Machines:
    """The devices and links of a training.

    Args:
        device: each of them.
        devices: of a node.
        nodes: how many.
        within: the link inside a node.
        between: the link between nodes.
    """

    device: DeviceType
    devices: int
    nodes: int
    within: LinkType = field(default=LINKS["nvlink4"])
    between: LinkType = field(default=LINKS["infiniband-ndr"])

    def on_a_node(self, size: int, stride: int) -> int:
        """How many ranks of a group are on one node: ``size`` ranks, ``stride`` apart."""
        return max(1, min(size, self.devices // stride))

    def bandwidth(self, size: int, stride: int) -> float:
        """Bytes a second through each rank of a group, in one direction.

        A ring crosses each border between nodes once in each direction, with the adapters of all members of the node.
        """
        together = self.on_a_node(size, stride)
        inside = self.within.bandwidth * self.within.share
        if together >= size:
            return inside
        link = self.between
        # The other groups of a node want its shared adapter at the same time.
        adapters = together if link.per == "device" else together / self.devices
        outside = adapters * link.bandwidth * link.share
        return outside if together == 1 else min(inside, outside)

    def link(self, size: int, stride: int) -> LinkType:
        """The link that a group's messages wait for."""
        return self.within if self.on_a_node(size, stride) >= size else self.between

    def seconds(self, kind: Kind, size: int, ranks: int, stride: int) -> float:
        """Time of a collective; ``size`` is as in ``cost.collectives``.

        Args:
            kind: which one.
            size: bytes.
            ranks: of the group.
            stride: from one of them to the next.
        """
        if ranks <= 1:
            return 0.0
        link = self.link(ranks, stride)
        hops = (ranks - 1).bit_length() * (2 if kind == "all_reduce" else 1)  # a tree's; a reduction goes up and down
        return link.start + hops * link.latency + wire_bytes(kind, size, ranks) / self.bandwidth(ranks, stride)
