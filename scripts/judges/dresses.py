r"""Responses made from a gold answer: right and wrong ones, in the many ways that models write.

A dress gives None where it does not suit the answer. `truth` is what a mathematician would say of the response;
"policy" where that depends on what a task asks for, such as a box.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from typing import Literal, NamedTuple

Truth = Literal["right", "wrong", "policy"]

_WHOLE = re.compile(r"-?\d{1,15}")
_FRACTION = re.compile(r"(-?)\\[dt]?frac\{(\d+)\}\{(\d+)\}")
_TUPLE = re.compile(r"\((-?\d+), ?(-?\d+)\)")
_INTERVAL = re.compile(r"([(\[])([^()\[\],]+),([^()\[\],]+)([)\]])")
_POWER_OF_TEN = re.compile(r"(-?[\d.]+) ?\\times ?10\^\{? ?(-?\d+)\}?|(-?[\d.]+)e(-?\d+)")
# Inside a formula the e is a number.
_E_NOTATION = re.compile(r"\de[-+]?\d")
_POLYNOMIAL = re.compile(r"[\da-z^{} +-]*[a-z][\da-z^{} +-]*")
_LETTER = re.compile(r"\\(?:text|textbf|mathrm)\{\(?([A-E])\)?\}")
_LIST = re.compile(r"-?\d+(?:, ?-?\d+)+")


class Dress(NamedTuple):
    name: str
    truth: Truth
    make: Callable[[str], str | None]


def boxed(answer: str | None) -> str | None:
    return None if answer is None else rf"The answer is $\boxed{{{answer}}}$."


def in_box(name: str, truth: Truth, make: Callable[[str], str | None]) -> Dress:
    return Dress(name, truth, lambda gold: boxed(make(gold)))


def _number(gold: str) -> int | None:
    return int(gold) if _WHOLE.fullmatch(gold) else None


def _on_whole(make: Callable[[int], str]) -> Callable[[str], str | None]:
    def dress(gold: str) -> str | None:
        number = _number(gold)
        return None if number is None else make(number)

    return dress


def _on_large(make: Callable[[str], str]) -> Callable[[str], str | None]:
    def dress(gold: str) -> str | None:
        number = _number(gold)
        return None if number is None or abs(number) < 1000 else make(f"{number:,}")

    return dress


def _on_fraction(make: Callable[[str, int, int], str | None]) -> Callable[[str], str | None]:
    def dress(gold: str) -> str | None:
        found = _FRACTION.fullmatch(gold)
        return make(found[1], int(found[2]), int(found[3])) if found else None

    return dress


def _decimal(digits: int) -> Callable[[str, int, int], str | None]:
    def dress(sign: str, top: int, bottom: int) -> str | None:
        value = Fraction(top, bottom)
        exact = value * 10**digits
        return None if exact.denominator == 1 else f"{sign}{float(value):.{digits}f}"

    return dress


def _exact_decimal(sign: str, top: int, bottom: int) -> str | None:
    value = Fraction(top, bottom) * 10**6
    return f"{sign}{float(Fraction(top, bottom)):g}" if value.denominator == 1 and top < 10**5 else None


def _other(gold: str) -> str:
    """An answer that is certainly another one."""
    number = _number(gold)
    return str(number + 1) if number is not None else rf"{gold} + 1" if not re.search(r"[a-zA-Z]", gold) else "-17"


def _negated(gold: str) -> str | None:
    if number := _number(gold):
        return str(-number)
    return f"-{gold}" if _FRACTION.fullmatch(gold) and gold[0] != "-" else None


def _with_other_end(gold: str) -> str | None:
    found = _INTERVAL.fullmatch(gold)
    if found is None or not (found[1] == "[" or found[4] == "]"):
        return None
    return f"{'[' if found[1] == '(' else '('}{found[2]},{found[3]}{found[4]}"


def _swapped(gold: str) -> str | None:
    found = _TUPLE.fullmatch(gold)
    return f"({found[2]}, {found[1]})" if found and found[1] != found[2] else None


def _members(gold: str) -> list[str] | None:
    return re.split(r", ?", gold) if _LIST.fullmatch(gold) else None


def _reversed(gold: str) -> str | None:
    members = _members(gold)
    return ", ".join(reversed(members)) if members else None


def _braced(gold: str) -> str | None:
    members = _members(gold)
    return rf"\{{{', '.join(members)}\}}" if members else None


def _and(gold: str) -> str | None:
    members = _members(gold)
    return f"{', '.join(members[:-1])} \\text{{ and }} {members[-1]}" if members else None


def _one_missing(gold: str) -> str | None:
    members = _members(gold)
    return ", ".join(members[1:]) if members else None


def _one_more(gold: str) -> str | None:
    members = _members(gold)
    return ", ".join([*members, "98765"]) if members else None


def _named(gold: str) -> str | None:
    return f"x = {gold}" if _number(gold) is not None or _FRACTION.fullmatch(gold) else None


def _without_text(gold: str) -> str | None:
    found = re.fullmatch(r"\\text\{([^{}]*)\}", gold)
    return found[1] if found else None


def _wide_brackets(gold: str) -> str | None:
    if not _INTERVAL.fullmatch(gold):
        return None
    return re.sub(r"([)\]])$", r" \\right\1", re.sub(r"^([(\[])", r"\\left\1 ", gold))


def _is_expression(gold: str) -> bool:
    """Whether arithmetic can go on with it: no list, relation, words, unit or interval."""
    if _E_NOTATION.search(gold):
        return False
    return not re.search(
        r"[,=<>;:%]|\\(?:text|mbox|mathrm|le|ge|in|cup|pm|begin|circ|infty|%|\$)|_\d|_\{|[()\[\]]$|\.\d", gold
    )


def _halved(gold: str) -> str | None:
    return rf"\frac{{2 ({gold})}}{{2}}" if _is_expression(gold) and _number(gold) is None else None


def _one_more_than(gold: str) -> str | None:
    return rf"1 + {gold}" if _is_expression(gold) and _number(gold) is None else None


def _doubled(gold: str) -> str | None:
    return rf"2 ({gold})" if _is_expression(gold) and gold != "0" else None


def _terms_reversed(gold: str) -> str | None:
    if not _POLYNOMIAL.fullmatch(gold) or _E_NOTATION.search(gold) or re.search(r"\{[^{}]*[+-]", gold) or "^-" in gold:
        return None
    terms = re.findall(r"[+-]?[^+-]+", gold.replace(" ", ""))
    if len(terms) < 2:
        return None
    signed = [term if term[0] in "+-" else f"+{term}" for term in reversed(terms)]
    return "".join(signed).removeprefix("+")


def _mixed(sign: str, top: int, bottom: int) -> str | None:
    whole, rest = divmod(top, bottom)
    return rf"{sign}{whole}\frac{{{rest}}}{{{bottom}}}" if whole and rest else None


def _other_power_form(gold: str) -> str | None:
    found = _POWER_OF_TEN.fullmatch(gold)
    if found is None:
        return None
    return f"{found[1]}e{found[2]}" if found[1] else rf"{found[3]} \times 10^{{{found[4]}}}"


def _other_power(gold: str) -> str | None:
    found = _POWER_OF_TEN.fullmatch(gold)
    if found is None:
        return None
    return rf"{found[1] or found[3]} \times 10^{{{int(found[2] or found[4]) + 1}}}"


def _inequality(gold: str) -> str | None:
    found = _INTERVAL.fullmatch(gold)
    if found is None or "infty" in gold or (found[1] == "(" and found[4] == ")"):
        return None
    signs = [r"\le" if bracket in "[]" else "<" for bracket in (found[1], found[4])]
    return f"{found[2]} {signs[0]} x {signs[1]} {found[3]}"


def _letter(form: str) -> Callable[[str], str | None]:
    def dress(gold: str) -> str | None:
        found = _LETTER.fullmatch(gold)
        return form.replace("LETTER", found[1]) if found else None

    return dress


def _other_letter(gold: str) -> str | None:
    found = _LETTER.fullmatch(gold)
    return rf"\text{{({'A' if found[1] != 'A' else 'B'})}}" if found else None


def _right_side(gold: str) -> str | None:
    sides = gold.split("=")
    return sides[1].strip() if len(sides) == 2 and re.fullmatch(r"[a-z](?:\([a-z]\))? ?", sides[0]) else None


def _bare_pair(gold: str) -> str | None:
    found = _TUPLE.fullmatch(gold)
    return f"{found[1]}, {found[2]}" if found else None


def _column(gold: str) -> str | None:
    found = _TUPLE.fullmatch(gold)
    return rf"\begin{{pmatrix}} {found[1]} \\ {found[2]} \end{{pmatrix}}" if found else None


def _sentence(form: str) -> Callable[[str], str | None]:
    return lambda gold: form.replace("GOLD", gold).replace("OTHER", _other(gold))


DRESSES: tuple[Dress, ...] = (
    # Where the answer stands.
    Dress("box", "right", boxed),
    Dress("box_bare", "right", _sentence(r"So we have \boxed{GOLD}")),
    Dress("box_display", "right", _sentence("Hence\n\\[\n\\boxed{GOLD}\n\\]")),
    Dress("box_i_hope", "right", _sentence(r"Therefore, the final answer is: $\boxed{GOLD}$. I hope it is correct")),
    Dress("box_then_text", "right", _sentence(r"It is $\boxed{GOLD}$, after 3 steps; 1 of 2 was hard.")),
    Dress("box_corrected", "right", _sentence(r"It is $\boxed{OTHER}$. No: it is $\boxed{GOLD}$.")),
    Dress("box_after_thought", "right", _sentence(r"<think>\boxed{OTHER}?</think> It is $\boxed{GOLD}$.")),
    Dress("fbox", "right", _sentence(r"It is $\fbox{GOLD}$.")),
    Dress("hash", "policy", _sentence("Add them.\n#### GOLD")),
    Dress("answer_line", "policy", _sentence("Add them.\nANSWER: GOLD")),
    Dress("answer_line_math", "policy", _sentence("Add them.\nANSWER: $GOLD$")),
    Dress("last_words", "policy", _sentence("Add them, and it is $GOLD$.")),
    Dress("box_open", "policy", _sentence(r"It is $\boxed{GOLD")),
    Dress("box_in_thought", "policy", _sentence(r"<think>It is $\boxed{GOLD}$. Let me check")),
    # The same answer in another form.
    in_box("wide_fraction", "right", lambda gold: gold.replace(r"\frac", r"\dfrac") if r"\frac" in gold else None),
    in_box("slash", "right", _on_fraction(lambda sign, top, bottom: f"{sign}{top}/{bottom}")),
    in_box("doubled_fraction", "right", _on_fraction(lambda s, top, bottom: rf"{s}\frac{{{2 * top}}}{{{2 * bottom}}}")),
    in_box("decimal_exact", "right", _on_fraction(_exact_decimal)),
    in_box("decimal_6", "policy", _on_fraction(_decimal(6))),
    in_box("decimal_2", "policy", _on_fraction(_decimal(2))),
    in_box("point_zero", "right", _on_whole(lambda number: f"{number}.0")),
    in_box("leading_zeros", "right", _on_whole(lambda number: f"{number:04d}")),
    in_box("comma", "right", _on_large(lambda text: text)),
    in_box("comma_tex", "right", _on_large(lambda text: text.replace(",", "{,}"))),
    in_box("comma_thin", "right", _on_large(lambda text: text.replace(",", r"\,"))),
    in_box("comma_negative_space", "right", _on_large(lambda text: text.replace(",", r",\!"))),
    in_box("unit_text", "right", _on_whole(lambda number: rf"{number} \text{{ cm}}")),
    in_box("unit_square", "right", _on_whole(lambda number: rf"{number}\ \mathrm{{cm}}^2")),
    in_box("unit_word", "right", _on_whole(lambda number: f"{number} dollars")),
    in_box("dollar", "right", _on_whole(lambda number: rf"\${number}")),
    in_box("degree", "right", _on_whole(lambda number: rf"{number}^\circ")),
    in_box("percent", "policy", _on_whole(lambda number: rf"{number}\%")),
    in_box("named", "right", _named),
    in_box("order", "right", _reversed),
    in_box("braces", "right", _braced),
    in_box("and", "right", _and),
    in_box("wide_brackets", "right", _wide_brackets),
    in_box("bare_words", "right", _without_text),
    in_box("spaces", "right", lambda gold: rf"\; {gold} \;"),
    in_box("sum", "right", _on_whole(lambda number: f"{number - 3} + 3")),
    in_box("halved", "right", _halved),
    in_box("terms_reversed", "right", _terms_reversed),
    in_box("mixed", "right", _on_fraction(_mixed)),
    in_box("minus_above", "right", _on_fraction(lambda s, top, bottom: rf"\frac{{-{top}}}{{{bottom}}}" if s else None)),
    in_box("power_of_ten", "right", _other_power_form),
    in_box("inequality", "right", _inequality),
    in_box("right_side", "policy", _right_side),
    in_box("bare_pair", "policy", _bare_pair),
    in_box("column", "policy", _column),
    in_box("letter", "right", _letter("LETTER")),
    in_box("letter_bold", "right", _letter(r"\textbf{(LETTER)}")),
    # Another answer.
    in_box("other", "wrong", _other),
    Dress("other_after_gold", "wrong", _sentence(r"It is $\boxed{GOLD}$. No: it is $\boxed{OTHER}$.")),
    Dress("gold_in_text", "wrong", _sentence(r"First $GOLD$ comes out, so the answer is $\boxed{OTHER}$.")),
    in_box("negated", "wrong", _negated),
    in_box("inverted", "wrong", _on_fraction(lambda s, top, bottom: rf"{s}\frac{{{bottom}}}{{{top}}}")),
    in_box("times_ten", "wrong", _on_whole(lambda number: str(10 * number) if number else "10")),
    in_box("tiny_error", "wrong", _on_whole(lambda number: f"{number}.0000001")),
    in_box("interval_end", "wrong", _with_other_end),
    in_box("pair_swapped", "wrong", _swapped),
    in_box("member_missing", "wrong", _one_missing),
    in_box("member_more", "wrong", _one_more),
    in_box("one_more", "wrong", _one_more_than),
    in_box("doubled", "wrong", _doubled),
    in_box("other_power", "wrong", _other_power),
    in_box("other_letter", "wrong", _other_letter),
    Dress("nothing", "wrong", lambda gold: "I do not know."),
)
