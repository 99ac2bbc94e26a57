"""Inline PTX of the device headers as calls of host functions (``cuda_ptx.h``).

``asm volatile("ldmatrix.sync.aligned... {%0, %1, %2, %3}, [%4];" : ... : ...)`` becomes ``ptx_ldmatrix_sync_aligned...(r[0], r[1], r[2],
r[3], address)``: named by the instruction, with its operands in the order of the text, so that the text itself is what is tested. An
instruction that has no host function is a compile error.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

ASM = re.compile(r"\basm\s*(?:volatile\s*)?\(")
STRING = re.compile(r'"((?:[^"\\]|\\.)*)"')
OPERAND = re.compile(r"%\d+|(?<![\w.])(?:0f[\da-f]{8}|\d+(?:\.\d+)?)(?![\w.])")  # 0f: the bits of a float
TICKET = re.compile(r"\*static_cast<volatile unsigned int\*>\((\w+)\)")
COMPARISONS = {"setp.ne.b32": "!=", "setp.lt.f32": "<"}
VECTOR = re.compile(r"\{([^{};]*)\}")  # registers that belong together; braces around statements are a scope
PREDICATED = re.compile(r"(?:@!?(\w+)\s+)?(.*)$", re.DOTALL)
INSTRUCTION = re.compile(r"([a-z][\w.:]*)(?:\s+(.*))?$", re.DOTALL)


def host_source(source: str) -> str:
    """``source`` with every asm statement, and every look at a ticket, replaced."""
    source = TICKET.sub(r"read_ticket(\1)", source)
    out, end = [], 0
    for match in ASM.finditer(source):
        sections, after = _sections(source, match.end())
        out += [source[end : match.start()], "{ " + " ".join(_calls(*sections)) + " }"]
        end = after
    return "".join([*out, source[end:]])


def _sections(source: str, start: int) -> tuple[tuple[str, list[str]], int]:
    """(template, operands) of the asm statement whose parenthesis opens before ``start``, and where its semicolon ends."""
    parts, depth, at, begin = [], 1, start, start
    while depth:
        if source[at] == '"':
            at = _match(STRING, source, at).end()
            continue
        depth += {"(": 1, ")": -1}.get(source[at], 0)
        if depth == 0 or (depth == 1 and source[at] == ":"):
            parts.append(source[begin:at])
            begin = at + 1
        at += 1
    template, *operands = parts
    text = "".join(STRING.findall(template)).replace("\\n", "\n")
    return (text, [operand for section in operands[:2] for operand in _operands(section)]), source.index(";", at) + 1


def _operands(section: str) -> Iterator[str]:
    """The expressions of ``"=r"(d[0]), "r"(x ? 16 : 0)``."""
    at = 0
    while found := STRING.search(section, at):
        begin = section.index("(", found.end())
        depth, at = 1, begin + 1
        while depth:
            depth += {"(": 1, ")": -1}.get(section[at], 0)
            at += 1
        yield section[begin + 1 : at - 1]


def _calls(template: str, operands: list[str]) -> Iterator[str]:
    for statement in re.split(r"[;\n{}]", VECTOR.sub(r"\1", template)):
        statement = statement.strip()
        predicate, statement = _match(PREDICATED, statement, 0).groups()
        if not statement or statement.startswith((".", "bra ")) or statement.endswith(":"):  # declarations, branches, labels
            continue
        name, rest = _match(INSTRUCTION, statement, 0).groups()
        arguments = [_argument(token, operands) for token in OPERAND.findall(rest or "")]
        if name in COMPARISONS:
            yield f"const bool {(rest or '').split(',')[0]} = {arguments[0]} {COMPARISONS[name]} {arguments[1]};"
        else:
            yield (f"if ({predicate}) " if predicate else "") + f"ptx_{re.sub(r'[.:]', '_', name)}({', '.join(arguments)});"


def _argument(token: str, operands: list[str]) -> str:
    if token.startswith("0f"):
        return f"__uint_as_float(0x{token[2:]}u)"
    return operands[int(token[1:])] if token[0] == "%" else token


def _match(pattern: re.Pattern[str], text: str, at: int) -> re.Match[str]:
    found = pattern.match(text, at)
    assert found is not None, f"inline PTX that the emulation cannot read: {text[at : at + 80]!r}"
    return found
