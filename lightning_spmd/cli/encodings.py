"""For locales that are not UTF-8: characters that cannot be written are lost, not the run."""

from __future__ import annotations

import locale
import re
import sys
from typing import Any


def write_whatever_comes() -> None:
    """Write characters that the output's encoding lacks as question marks from now on."""
    for stream in (sys.stdout, sys.stderr):
        output: Any = stream
        if output is None or not hasattr(output, "reconfigure") or _is_unicode(output.encoding):
            continue
        if output.errors in ("strict", "surrogateescape"):  # the second in the locales C and POSIX
            output.reconfigure(errors="replace")


def misread(content: bytes) -> str | None:
    """What goes wrong when jsonargparse reads a recipe in the locale's encoding; None if nothing does.

    Args:
        content: of the file.
    """
    encoding = locale.getpreferredencoding(False)
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError:
        return None
    found = re.search(r"[^\x00-\x7f]", text)
    if found is None or _is_unicode(encoding):
        return None
    line = text.count("\n", 0, found.start()) + 1
    character = ascii(found[0])[1:-1]
    return f"line {line} has {character} in UTF-8, and the locale reads files as {encoding}: set PYTHONUTF8=1"


def _is_unicode(encoding: str | None) -> bool:
    return (encoding or "").lower().replace("_", "-").startswith("utf")
