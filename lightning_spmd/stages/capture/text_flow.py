"""Where a text goes that Python code has just made, read from the bytecode.

    print(f"loss {loss.item():.3f}")      into a call of ``print``, and nowhere else

Such a text may be made after the graph ran. One that is compared, cut or used as a key decides something, so it is made
of the value at once.
"""

from __future__ import annotations

import dis
from collections.abc import Sequence
from types import CodeType, FrameType

SINKS = frozenset(
    {
        "print", "info", "debug", "warning", "error", "critical", "exception", "append", "rank_zero_info", "add_text",
        "add_scalar", "add_scalars", "add_histogram", "add_image", "add_images", "add_figure", "log_text",
        "log_metrics", "log_metric",
    }
)  # fmt: skip
"""Functions and methods that take a text and tell nobody what it is."""
_FORMATS = frozenset({"FORMAT_VALUE", "FORMAT_SIMPLE", "FORMAT_WITH_SPEC"})
_CALLS = frozenset({"CALL", "CALL_KW"})
_MAKERS = frozenset({"str", "format", "repr"})
_NOTHING = frozenset({"CACHE", "NOP", "PRECALL", "KW_NAMES", "RESUME"})
_PUSH = frozenset({"LOAD_CONST", "LOAD_GLOBAL", "LOAD_DEREF", "LOAD_CLOSURE", "PUSH_NULL", "LOAD_SMALL_INT"})
_POPS = {"LOAD_ATTR": 1, "LOAD_METHOD": 1, "BINARY_SUBSCR": 2, "BINARY_OP": 2, "COMPARE_OP": 2, "CONVERT_VALUE": 1}
_BUILDERS = frozenset({"BUILD_STRING", "BUILD_TUPLE", "BUILD_LIST"})
_instructions: dict[int, tuple[CodeType, list[dis.Instruction]]] = {}


def goes_to_a_sink(frame: FrameType) -> bool:
    """Whether what the instruction that runs makes is a text that sinks alone take."""
    steps = _of(frame.f_code)
    now = next((i for i, step in enumerate(steps) if step.offset == frame.f_lasti), None)
    if now is None:
        return False
    name = steps[now].opname
    if name in _CALLS and _callee(steps, now) not in _MAKERS:
        return False
    if name not in _CALLS and name not in _FORMATS:
        return False
    return _sunk(frame.f_code, steps, now)


def _of(code: CodeType) -> list[dis.Instruction]:
    known = _instructions.get(id(code))
    if known is None:
        known = _instructions[id(code)] = (code, list(dis.get_instructions(code)))
    return known[1]


def _sunk(code: CodeType, steps: Sequence[dis.Instruction], made: int) -> bool:
    """Whether what the instruction ``made`` leaves on top of the stack ends in sinks."""
    above = 0
    for index in range(made + 1, len(steps)):
        step = steps[index]
        taken = _taken(step)
        if taken is None:
            return False
        if taken > above:  # takes the text
            if step.opname in _CALLS:
                return _callee(steps, index) in SINKS
            if step.opname == "STORE_FAST":
                return _local_is_sunk(code, steps, step.argval)
            if step.opname != "BUILD_STRING":
                return False
            above = 0
            continue
        above += _left(step) - taken
    return False


def _local_is_sunk(code: CodeType, steps: Sequence[dis.Instruction], name: str) -> bool:
    if name in code.co_cellvars or "locals" in code.co_names:
        return False
    uses = [i for i, step in enumerate(steps) if step.argval == name and step.opname.startswith("LOAD_FAST")]
    if any(steps[i].opname not in ("LOAD_FAST", "LOAD_FAST_BORROW", "LOAD_FAST_CHECK") for i in uses):
        return False
    writes = [i for i, step in enumerate(steps) if step.argval == name and step.opname.startswith("STORE_FAST")]
    return len(writes) == 1 and bool(uses) and all(_sunk(code, steps, i) for i in uses)


def _taken(step: dis.Instruction) -> int | None:
    """How many values an instruction takes from the stack; None: of no kind that is expected in a call's arguments."""
    name, arg = step.opname, step.arg or 0
    if name in _NOTHING:
        return 0
    if name in _PUSH or name.startswith("LOAD_FAST"):
        return 0
    if name in _POPS:
        return _POPS[name]
    if name in _FORMATS:
        return 2 if name == "FORMAT_WITH_SPEC" or (name == "FORMAT_VALUE" and arg & 4) else 1
    if name in _BUILDERS:
        return arg
    if name in _CALLS:
        return arg + 2 + (name == "CALL_KW")
    return 1 if name in ("STORE_FAST", "POP_TOP") else None


def _left(step: dis.Instruction) -> int:
    """How many values it puts there."""
    name, taken = step.opname, _taken(step) or 0
    if name in _NOTHING or name in ("STORE_FAST", "POP_TOP"):
        return 0
    if name in _CALLS or name in _FORMATS or name in _BUILDERS:
        return 1
    return taken + dis.stack_effect(step.opcode, step.arg, jump=False)


def _callee(steps: Sequence[dis.Instruction], call: int) -> str | None:
    """Name of the function or method that a call calls."""
    arguments = (steps[call].arg or 0) + (steps[call].opname == "CALL_KW")
    for start in range(call - 1, -1, -1):
        step = steps[start]
        loads = step.opname in ("LOAD_METHOD", "LOAD_ATTR", "LOAD_GLOBAL")
        if not loads or (step.opname != "LOAD_METHOD" and not (step.arg or 0) & 1):
            if loads or _taken(step) is not None:
                continue
            return None
        height = 0
        for inner in steps[start + 1 : call]:
            taken = _taken(inner)
            if taken is None or taken > height:
                break
            height += _left(inner) - taken
        else:
            if height == arguments:
                return str(step.argval)
    return None
