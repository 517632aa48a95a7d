"""Elements and colours that the pictures share."""

from __future__ import annotations

from html import escape
from typing import Any

from lightning_spmd.planning.contents import ACTIVATIONS, GRADIENTS, INPUTS, MESSAGES, PARAMETERS, STATE, WORKSPACE

OF_KIND = {
    PARAMETERS: "#4c6ef5",
    STATE: "#9775fa",
    INPUTS: "#adb5bd",
    GRADIENTS: "#f76707",
    ACTIVATIONS: "#37b24d",
    MESSAGES: "#e64980",
    WORKSPACE: "#fab005",
}
"""By kind of what memory holds."""
OF_SECTION = {
    "forward": "#37b24d",
    "backward": "#f76707",
    "clip": "#fab005",
    "optimizer": "#9775fa",
    "communication": "#e64980",
}
"""By part of the iteration; packing of messages counts as communication."""
WAITING = "#ffc9c9"
OTHER = "#868e96"


def tag(name: str, content: str = "", /, **attributes: Any) -> str:
    """An element around markup; of an attribute's name a trailing underscore is dropped, others become hyphens."""
    named = "".join(f' {key.rstrip("_").replace("_", "-")}="{escape(_text(v))}"' for key, v in attributes.items())
    return f"<{name}{named}>{content}</{name}>"


def percent(share: float) -> str:
    """A share as SVG takes lengths."""
    return f"{100 * share:.3f}%"


def legend(colours: dict[str, str]) -> str:
    """What colours mean."""
    items = [tag("span", tag("i", "", style=f"background:{c}") + escape(name)) for name, c in colours.items()]
    return tag("div", "".join(items), class_="legend")


def _text(value: Any) -> str:
    return f"{value:.3f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
