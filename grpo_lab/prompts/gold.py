"""Reading the reference answer out of a column's value. Whatever the type, the value stays the one in the file."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from decimal import Decimal, InvalidOperation
from typing import Any

_THOUSANDS_COMMA = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")


class RowFault(ValueError):
    """Why a row cannot be used, as a clause: `the gold answer is empty`."""


class NoReference(Exception):
    """The row is well-formed and has no answer by design (a proof)."""


def plain(value: Any) -> str:
    """The value as text: 33 is "33", 0.5 is "0.5", "033" stays "033", a list gives all its members."""
    if isinstance(value, list | tuple):
        return every_member(value)
    if isinstance(value, str):
        text = value.strip()
    elif isinstance(value, bool) or not isinstance(value, int | float | Decimal):
        raise RowFault(f"the gold answer is unreadable ({'null' if value is None else type(value).__name__})")
    elif isinstance(value, int):
        text = str(value)
    elif not math.isfinite(value):
        raise RowFault(f"the gold answer is unreadable ({value})")
    else:
        text = format(Decimal(str(value)), "f")
    if not text:
        raise RowFault("the gold answer is empty")
    return text


def after_hash(value: Any) -> str:
    """What follows the last `####` of a worked solution (GSM8K), thousands commas removed."""
    _, mark, answer = plain(value).rpartition("####")
    if not mark:
        raise RowFault("the gold answer has no #### mark")
    if not answer.strip():
        raise RowFault("the gold answer is empty after ####")
    return _THOUSANDS_COMMA.sub("", answer.strip())


def last_box(value: Any) -> str:
    r"""The inside of the last balanced \boxed{...} of a worked solution."""
    text = plain(value)
    for opening in reversed(list(_BOX.finditer(text))):
        inside = _until_closed(text, opening.end())
        if inside is not None:
            if not inside.strip():
                raise RowFault("the gold answer is an empty box")
            return inside.strip()
    raise RowFault(r"the gold answer has no closed \boxed{}")


def every_member(value: Any) -> str:
    """All members of a list, joined by a comma and a blank (OlympiadBench). Null has no answer by design: a proof."""
    if value is None:
        raise NoReference
    if not isinstance(value, list | tuple):
        return plain(value)
    if not value:
        raise RowFault("the gold answer is an empty list")
    # The blank keeps "2" and "500" apart from 2,500.
    return ", ".join(plain(member) for member in value)


def number(value: Any) -> str:
    """A number in its shortest form: 14.0 and "14.0" are "14", 0.50 is "0.5"."""
    try:
        parsed = Decimal(_THOUSANDS_COMMA.sub("", plain(value)))
    except InvalidOperation as error:
        raise RowFault(f"the gold answer {value!r} is no number") from error
    if not parsed.is_finite():
        raise RowFault(f"the gold answer {value!r} is no finite number")
    text = format(parsed, "f")
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return "0" if text == "-0" else text


def nested(value: Any) -> str:
    """The `ground_truth` in a nested record: {"ground_truth": "5"} or {"ground_truth": {"value": "5"}}."""
    if not isinstance(value, Mapping) or "ground_truth" not in value:
        raise RowFault("the gold answer has no ground_truth inside")
    truth = value["ground_truth"]
    return plain(truth.get("value") if isinstance(truth, Mapping) else truth)


READERS: Mapping[str, Callable[[Any], str]] = {
    "plain": plain,
    "hash": after_hash,
    "boxed": last_box,
    "list": every_member,
    "number": number,
    "chat_gold": nested,
}


def _until_closed(text: str, start: int) -> str | None:
    """The text from `start` to the brace that closes the one before it; None if none does. `\\{` is no brace."""
    depth, index = 1, start
    while index < len(text):
        if text[index] == "\\":
            index += 2
            continue
        depth += {"{": 1, "}": -1}.get(text[index], 0)
        if depth == 0:
            return text[start:index]
        index += 1
    return None
