"""Mistakes in one line: the key, what was given, what is allowed. jsonargparse says it in ten."""

from __future__ import annotations

import re
from typing import Any

from lightning_spmd.cli.recipe_cli import Parser, advice

_KEY = re.compile(r'Parser key "([^"]+)"')
_EXPECTED = re.compile(r"Expected an? (.+)")
_GIVEN = re.compile(r"Given value: (.+)")
_WORDS = {
    "<class 'int'>": "a whole number",
    "<class 'float'>": "a number",
    "<class 'bool'>": "true, false",
    "<class 'NoneType'>": "null",
    "<class 'str'>": "a word",
}
_LONGEST = 400


class OneLineParser(Parser):
    """Answers a mistake with one line."""

    def error(self, message: str, ex: Exception | None = None) -> Any:
        """Answer a mistake; does not return."""
        if not self.exit_on_error:  # the parser of a class within the command's, which says more
            return super().error(message, ex)
        options = [option for action in self._actions for option in action.option_strings]
        return self.exit(2, f"{self.prog}: error: {one_line(message, options)}\n")


def one_line(message: str, options: list[str]) -> str:
    """What a message of jsonargparse says, in one line.

    Args:
        message: the message.
        options: of the command.
    """
    hints = " ".join(advice(message, options))
    keys, allowed = _KEY.findall(message), list(dict.fromkeys(map(_in_words, _EXPECTED.findall(message))))
    given = _GIVEN.findall(message)
    path = ".".join(_without_repeats(keys))
    if path and hints:  # of a class in the recipe: what it takes
        return f"{path}: {hints}"
    if path and allowed and given:
        text = f"{path}: {given[-1].strip()} is not one of: {', '.join(allowed)}"
    else:
        text = " ".join(message.split())
    text = text if len(text) <= _LONGEST else text[:_LONGEST] + " ..."
    return f"{text}. {hints}" if hints else text


def _without_repeats(keys: list[str]) -> list[str]:
    """Keys from the outermost to the innermost one; the outer ones are said again by the inner ones."""
    found: list[str] = []
    for key in keys:
        if not any(key == other or other.endswith("." + key) for other in found):
            found = [other for other in found if not key.startswith(other + ".")] + [key]
    return found


def _in_words(kind: str) -> str:
    kind = kind.strip().rstrip(".")
    literal = re.fullmatch(r"typing\.Literal\[(.+)\]", kind)
    return (
        literal[1].replace("'", "") if literal else _WORDS.get(kind, kind.removeprefix("<class '").removesuffix("'>"))
    )
