"""What a piece of Python code can look at, read from its code object: names, constants, imports.

    def factor(self): return self.crit.gamma * LEVEL        names {crit, gamma, LEVEL}

A walk from a frame's arguments that follows these names alone meets what the frame can read and little else. Code that
computes the names (``getattr(x, f"w{i}")``, ``vars(x)``) can read everything.
"""

from __future__ import annotations

import dis
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import CodeType

# Their result depends on attributes that the code does not name.
_READ_EVERYTHING = frozenset(
    {
        "builtins", "__builtins__", "__dict__", "asdict", "astuple", "fields", "copy", "deepcopy", "replace", "dumps",
        "__getstate__", "__reduce__", "getmembers",
    }
)  # fmt: skip
# So do these functions of Python's own. As attributes they are something else: ``module.eval()``.
_BUILTINS_THAT_DO = frozenset({"vars", "locals", "globals", "eval", "exec", "dir"})
_OF_AN_OBJECT = frozenset({"LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"})
_BY_NAME = frozenset({"getattr", "hasattr", "setattr", "delattr"})
_ENVIRONMENT = frozenset({"environ", "getenv"})


@dataclass(frozen=True)
class CodeFacts:
    """What one code object, with the functions and comprehensions written inside it, can look at.

    Args:
        code: the code object.
        names: attributes and globals that it names, and ``constants``.
        constants: string constants that could be names.
        imports: modules that it imports.
        everything: it may read attributes by names that it computes.
        environment: it reads environment variables.
        catches: it may catch the error of an attribute that is not there.
    """

    code: CodeType
    names: frozenset[str]
    constants: frozenset[str]
    imports: tuple[str, ...]
    everything: bool
    environment: bool
    catches: bool

    @property
    def arguments(self) -> tuple[str, ...]:
        """Names of its parameters."""
        code = self.code
        flags = bool(code.co_flags & 0x04) + bool(code.co_flags & 0x08)  # *args, **kwargs
        return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + flags]

    @classmethod
    def nothing(cls) -> CodeFacts:
        """Of code that names nothing."""
        return cls(
            (lambda: None).__code__, frozenset(), frozenset(), (), everything=False, environment=False, catches=False
        )


def facts_of(code: CodeType) -> CodeFacts:
    """Read a code object; the same facts, as an object, for the same code."""
    known = _known.get(id(code))
    if known is None:
        known = _known[id(code)] = _read(code)  # holds the code, so that its id stays its own
    return known


_known: dict[int, CodeFacts] = {}


def _read(code: CodeType) -> CodeFacts:
    family = list(_family(code))
    names = frozenset(name for part in family for name in (*part.co_names, *part.co_freevars))
    constants = frozenset(word for part in family for word in _words(part.co_consts))
    everything = not names.isdisjoint(_READ_EVERYTHING) or any(
        _computes_names(part) or _calls_a_reader(part) for part in family
    )
    imports = tuple(name for part in family for name in _imports(part))
    catches = any(part.co_exceptiontable for part in family)
    environment = not names.isdisjoint(_ENVIRONMENT)
    return CodeFacts(code, names | constants, constants, imports, everything, environment, catches)


def line_that_changes(codes: Sequence[CodeType], name: str) -> str | None:
    """``file:line`` that assigns an attribute or variable ``name``, or else the first that mentions it."""
    mentioned: str | None = None
    for code in codes:
        for part in _family(code):
            line = part.co_firstlineno
            for instruction in dis.get_instructions(part):
                line = instruction.starts_line if type(instruction.starts_line) is int else line
                if instruction.argval == name:
                    here = f"{part.co_filename}:{line}"
                    if instruction.opname.startswith(("STORE_", "DELETE_")):
                        return here
                    mentioned = mentioned or here
    return mentioned


def _family(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _family(constant)


def _words(constants: tuple[object, ...]) -> Iterator[str]:
    for constant in constants:
        if isinstance(constant, str):
            if len(constant) < 100:  # no texts
                yield from (part for part in constant.split(".") if part.isidentifier())
        elif isinstance(constant, (tuple, frozenset)):
            yield from _words(tuple(constant))


def _imports(code: CodeType) -> list[str]:
    if dis.opmap["IMPORT_NAME"] not in code.co_code[::2]:
        return []
    return [i.argval for i in dis.get_instructions(code) if i.opname == "IMPORT_NAME" and i.argval]


def _calls_a_reader(code: CodeType) -> bool:
    """Whether it names one of Python's own functions that read everything, not an attribute of that name."""
    if _BUILTINS_THAT_DO.isdisjoint((*code.co_names, *code.co_freevars)):
        return False
    return any(
        i.argval in _BUILTINS_THAT_DO and i.opname.startswith("LOAD_") and i.opname not in _OF_AN_OBJECT
        for i in dis.get_instructions(code)
    )


def _computes_names(code: CodeType) -> bool:
    """Whether it calls ``getattr`` or its like with a name that is not a constant."""
    if _BY_NAME.isdisjoint(code.co_names):
        return False
    instructions = list(dis.get_instructions(code))
    starts = (i for i, x in enumerate(instructions) if x.opname.startswith("LOAD_") and x.argval in _BY_NAME)
    return not all(_name_is_constant(instructions[start + 1 :]) for start in starts)


def _name_is_constant(following: list[dis.Instruction]) -> bool:
    """Whether the call whose function was just loaded has a constant as its second argument."""
    depth, constant = 0, False
    for instruction in following:
        if instruction.opname in ("PRECALL", "CALL", "CALL_KW", "CALL_FUNCTION_EX") and depth == instruction.arg:
            return constant
        if instruction.opcode in dis.hasjrel or instruction.opcode in dis.hasjabs:
            return False
        before = depth
        depth += dis.stack_effect(instruction.opcode, instruction.arg)
        if depth == 2 and before == 1:
            constant = instruction.opname == "LOAD_CONST"
        elif depth <= 2:  # something worked on the second argument
            constant = constant and depth == 2 and before == 2 and instruction.opname in ("CACHE", "NOP")
    return False
