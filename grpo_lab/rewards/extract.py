"""Where the final answer of a completion stands. Only marks count: a box, or a line after `####`.

Everything here is a linear scan of text: it runs in the caller's process on whatever a model wrote.
"""

from __future__ import annotations

import re

_BOX = re.compile(r"\\(?:boxed|fbox|framebox)(?![A-Za-z])\s*")
_BARE_BOX = re.compile(r"[^\s${}]\S*?(?=[.,;]?(?:\s|\$|\\\)|\\\]|\\(?:boxed|fbox|framebox)|$))")
_BRACES = re.compile(r"\\.|[{}]", re.DOTALL)
_HASH_MARK = re.compile(r"(?<!#)####(?!#)[^\S\n]*\n?([^\n]*)")

# Digits, a sign, currency, a bracket, or a command; headings begin with words.
_VALUE_BEGINS = re.compile(r"\s*[-+.\d$€£\\(\[{\u2212]")


def final_answer(completion: str) -> str | None:
    r"""The text of the last final answer, or None.

    An answer is a complete `\boxed{...}` (also `\fbox`, `\framebox`, and `\boxed 2`) or the rest of the line after
    `####`; whichever comes last in the text after the last `</think>` counts, the outer one of nested boxes. Behind a
    box, a line after `####` that begins with a word is a heading. An empty last answer is no answer, and neither is a
    box that is never closed.
    """
    text = _after_thought(completion)
    box = _last_box(text)
    marks = list(_HASH_MARK.finditer(text))
    if marks and (box is None or (marks[-1].start() >= box[0] and _VALUE_BEGINS.match(marks[-1].group(1)))):
        return marks[-1].group(1).strip() or None
    return box[1].strip() or None if box is not None else None


def text_after_hash(completion: str) -> str | None:
    """What follows the last `#`, stripped; None where there is no `#`."""
    _, mark, answer = completion.rpartition("#")
    return answer.strip() if mark else None


def _after_thought(completion: str) -> str:
    """The part that is not thinking: after the last `</think>`, and before a `<think>` that was never closed."""
    answer = completion.rpartition("</think>")[2]
    return answer.partition("<think>")[0]


def _last_box(text: str) -> tuple[int, str] | None:
    """Where the last complete outermost box ends, and what is in it."""
    closings = _closing_braces(text)
    last: tuple[int, str] | None = None
    for box in _BOX.finditer(text):
        start = box.end()
        if last is not None and box.start() < last[0]:
            continue
        if text[start : start + 1] != "{":
            if bare := _BARE_BOX.match(text, start):
                last = bare.end(), bare.group()
        elif (end := closings.get(start)) is not None:
            last = end + 1, text[start + 1 : end]
    return last


def _closing_braces(text: str) -> dict[int, int]:
    """Opening brace -> its closing brace, for every pair that is complete. Escaped braces are text."""
    pairs: dict[int, int] = {}
    opened: list[int] = []
    for token in _BRACES.finditer(text):
        if token.group() == "{":
            opened.append(token.start())
        elif token.group() == "}" and opened:
            pairs[opened.pop()] = token.start()
    return pairs
