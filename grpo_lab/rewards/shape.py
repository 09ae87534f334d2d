r"""What kind of thing an answer is: a value, a list, a set, a tuple, a named value, an equation.

Read from the text, because the library's parser cannot tell some of these apart ((1,4) is an interval to it,
`52_8` is 52, and `343, 512` compares by its members in an order that sympy picks).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass

MAX_MEMBERS = 128
MAX_SIGNS = 3

_TOKEN = re.compile(r"\\begin(?=\{)|\\end(?=\{)|\\[A-Za-z]+|\\.|(?<![A-Za-z])(?:and|or)(?![A-Za-z])|.", re.DOTALL)
_OPENING = frozenset(["(", "[", "{", r"\{", r"\begin"])
_CLOSING = frozenset([")", "]", "}", r"\}", r"\end"])
_LIST_MARKS = frozenset([",", ";", "and", "or"])
_RELATIONS = frozenset(
    [
        "<",
        ">",
        r"\leq",
        r"\geq",
        r"\neq",
        r"\in",
        r"\notin",
        r"\cup",
        r"\cap",
        r"\setminus",
        r"\subset",
        r"\subseteq",
        r"\equiv",
    ]
)
_APPROXIMATELY = frozenset([r"\approx", r"\simeq", r"\sim"])
_GROUPED = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])")
_BASED = re.compile(r"(?P<digits>\d[\dA-Fa-f]*)\s*_\s*(?:\{\s*(?P<braced>\d+)\s*\}|(?P<base>\d+))")
_MATRIX = re.compile(r"\\begin\{[pb]?matrix\}(.*)\\end\{[pb]?matrix\}", re.DOTALL)
_SIGN = re.compile(r"\\pm(?![A-Za-z])|\\mp(?![A-Za-z])")
# Of a name: indices, primes, arguments (without operators: x(x+1) is a product), norm bars.
_NAME_DECORATION = re.compile(
    r"_\{[^{}]*\}|_[A-Za-z0-9]|\^\{\s*(?:-1|\\prime)\s*\}|'+|(?<=[A-Za-z])\([A-Za-z0-9,\s]*\)|[|{}\s]"
)
_NAME = re.compile(
    r"(?:[A-Za-z]|\\(?:text|angle|triangle|overline|vec|hat|bar|widehat|ell|mho|alpha|beta|gamma|delta|epsilon|varepsilon|zeta|eta|"
    r"theta|vartheta|iota|kappa|lambda|mu|nu|xi|rho|sigma|tau|upsilon|phi|varphi|chi|psi|omega|Gamma|Delta|Theta|Lambda|Xi|"
    r"Sigma|Phi|Psi|Omega)(?![A-Za-z]))+"
)


@dataclass(frozen=True, slots=True)
class Value:
    """A single value, as text for the parser."""

    text: str


@dataclass(frozen=True, slots=True)
class Listing:
    """Members without brackets: order does not matter, repetitions do."""

    parts: tuple[Answer, ...]


@dataclass(frozen=True, slots=True)
class Braces:
    """A set: neither order nor repetitions matter."""

    parts: tuple[Answer, ...]


@dataclass(frozen=True, slots=True)
class Ordered:
    """Members in order between `brackets`: a tuple, an interval, a ratio, a number in a base, a matrix by rows."""

    brackets: str
    parts: tuple[Answer, ...]


@dataclass(frozen=True, slots=True)
class Named:
    """`name = value` (or a name `in` a set)."""

    name: str
    value: Answer


@dataclass(frozen=True, slots=True)
class Equation:
    """Sides joined by equals signs, the first of which is no mere name."""

    sides: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Relation:
    """Inequalities and set expressions: left whole, for the library to compare."""

    text: str


Answer = Value | Listing | Braces | Ordered | Named | Equation | Relation


def readings(text: str) -> list[Answer]:
    """The ways to read an answer, likeliest first: `1,234` is a number and may be a list of two.

    None for more members than any answer has.
    """
    if text.count(",") + text.count(";") >= MAX_MEMBERS:
        return []
    joined = _join_groups(text)
    return [read(joined)] if joined == text else [read(joined), read(text)]


def read(text: str) -> Answer:
    """The shape of a plain-spelled answer (see `dress.undress`)."""
    text = text.strip()
    alternatives = split(text, frozenset(["or"]))
    if len(alternatives) > 1 and all(_is_relation(one) for one in alternatives):
        return Relation(" or ".join(one.strip(" ,") for one in alternatives))
    parts = split(text, _LIST_MARKS)
    if len(parts) > 1:
        members = [part for part in parts if part.strip()]
        return _read_list(members) if len(members) > 1 else read(members[0]) if members else Value(text)
    return _read_one(text)


def values(answer: Answer) -> Iterator[str]:
    """Every text in it that the parser will have to read."""
    match answer:
        case Value(text) | Relation(text):
            yield text
        case Named(_, value):
            yield from values(value)
        case Equation(sides):
            yield from sides
        case Listing(parts) | Braces(parts) | Ordered(_, parts):
            for part in parts:
                yield from values(part)


def split(text: str, marks: frozenset[str]) -> list[str]:
    """The text cut at those of the marks that stand outside all brackets."""
    parts, start = [], 0
    for begin, end, token in top_level(text):
        if token in marks:
            parts.append(text[start:begin])
            start = end
    return [*parts, text[start:]]


def top_level(text: str) -> Iterator[tuple[int, int, str]]:
    """(start, end, token) of the tokens outside all brackets. Brackets of different kinds may close each other."""
    depth = 0
    for match in _TOKEN.finditer(text):
        token = match.group()
        if token in _OPENING:
            depth += 1
        elif token in _CLOSING:
            depth = max(depth - 1, 0)
        elif depth == 0:
            yield match.start(), match.end(), token


def _read_list(members: list[str]) -> Answer:
    first = read(members[0])
    if isinstance(first, Named) and not any("=" in member for member in members[1:]):
        return Named(first.name, _flat(Listing, [first.value, *map(read, members[1:])]))
    return _flat(Listing, [first, *map(read, members[1:])])


def _flat(kind: type[Listing] | type[Braces], members: list[Answer]) -> Answer:
    """Members that are lists themselves (1 \\pm \\sqrt 5) are members of the whole."""
    parts: list[Answer] = []
    for member in members:
        parts.extend(member.parts if isinstance(member, Listing) else [member])
    return kind(tuple(parts))


def _read_one(text: str) -> Answer:
    exact, *approximations = split(text, _APPROXIMATELY)
    if approximations and not exact.strip():
        return read(approximations[0])
    if approximations:
        return Named(_squeeze(exact), read(approximations[0])) if is_name(exact) else read(exact)
    tokens = [token for _, _, token in top_level(text)]
    if "=" in tokens:
        return _read_equation([side.strip() for side in split(text, frozenset("="))])
    if (members := _in_braces(text)) is not None:
        return members
    if 1 <= len(_SIGN.findall(text)) <= MAX_SIGNS:
        return _flat(Listing, [read(branch) for branch in _branches(text)])
    if tokens.count(r"\in") == 1 and is_name(text.partition(r"\in")[0]):
        name, _, members_text = text.partition(r"\in")
        return Named(_squeeze(name), read(members_text))
    if _is_relation(text):
        return Relation(text)
    return _read_brackets(text)


def _read_equation(sides: list[str]) -> Answer:
    if len(sides) == 2 and is_name(sides[1]) and not is_name(sides[0]):
        sides.reverse()
    if not is_name(sides[0]):
        return Equation(tuple(sides))
    value = read(sides[1]) if len(sides) == 2 else Equation(tuple(sides[1:]))
    return Named(_squeeze(sides[0]), value)


def _in_braces(text: str) -> Answer | None:
    if text == r"\emptyset":
        return Braces(())
    inner = _between(text, r"\{", r"\}")
    if inner is None:
        return None
    return _flat(Braces, [read(member) for member in split(inner, _LIST_MARKS) if member.strip()])


def _read_brackets(text: str) -> Answer:
    if match := _BASED.fullmatch(text):
        return Ordered("base", (Value(match["digits"]), Value(match["braced"] or match["base"])))
    if match := _MATRIX.fullmatch(text):
        rows = [row.split("&") for row in re.split(r"\\\\", match[1]) if row.strip()]
        cells = tuple(read(cell) for cell in itertools.chain.from_iterable(rows))
        return Ordered(f"matrix {len(rows)}x{len(rows[0])}" if rows else "matrix", cells)
    for opening, closing in itertools.product("([", ")]"):
        if (inner := _between(text, opening, closing)) is None:
            continue
        parts = split(inner, frozenset(",;"))
        if len(parts) > 1 and all(part.strip() for part in parts):
            return Ordered(opening + closing, tuple(map(read, parts)))
        if len(parts) == 1 and opening + closing == "()":
            return read(inner)
    ratio = split(text, frozenset(":"))
    if len(ratio) > 2 and all(part.strip() for part in ratio):
        return Ordered(":", tuple(map(read, ratio)))
    return Value(text)


def _is_relation(text: str) -> bool:
    return any(token in _RELATIONS for _, _, token in top_level(text))


def _between(text: str, opening: str, closing: str) -> str | None:
    """What stands between a first and a last bracket that belong together."""
    if not (text.startswith(opening) and text.endswith(closing) and len(text) >= len(opening) + len(closing)):
        return None
    inner = text[len(opening) : len(text) - len(closing)]
    depth = 0
    for match in _TOKEN.finditer(inner):
        depth += (match.group() in _OPENING) - (match.group() in _CLOSING)
        if depth < 0:
            return None
    return inner if depth == 0 else None


def _branches(text: str) -> list[str]:
    r"""The values that \pm stands for. Several \pm are free of each other, \mp is the opposite of its \pm."""
    signs = _SIGN.findall(text)
    tied = r"\mp" in signs
    branches = []
    for choice in itertools.product("+-", repeat=1 if tied else len(signs)):
        upper = iter(choice * len(signs) if tied else choice)
        pieces = _SIGN.split(text)
        chosen = [
            sign if command == r"\pm" else {"+": "-", "-": "+"}[sign]
            for command, sign in zip(signs, upper, strict=True)
        ]
        branches.append(pieces[0] + "".join(sign + piece for sign, piece in zip(chosen, pieces[1:], strict=True)))
    return branches


def is_name(text: str) -> bool:
    r"""Whether a side of an equation only names the value: `x`, `AB`, `\angle ABC`, `f(x)`, `\text{Area}`."""
    bare = re.sub(r"\\text\{[^{}]*\}", r"\\text", text)
    return _NAME.fullmatch(_NAME_DECORATION.sub("", bare)) is not None or _is_variable_tuple(text.strip())


def _is_variable_tuple(text: str) -> bool:
    inner = _between(text, "(", ")")
    return inner is not None and re.fullmatch(r"[a-zA-Z](?:\s*,\s*[a-zA-Z])+", inner.strip()) is not None


def _squeeze(text: str) -> str:
    return re.sub(r"\s+", "", text)


def _join_groups(text: str) -> str:
    """Thousands commas taken out of numbers that stand outside all brackets."""
    outside = {start for start, _, _ in top_level(text)}
    return _GROUPED.sub(lambda m: m.group().replace(",", "") if m.start() in outside else m.group(), text)
