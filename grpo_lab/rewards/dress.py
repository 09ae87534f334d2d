r"""Typography off: one plain spelling for the many ways to set the same answer.

Nothing here decides what an answer means. Fonts, spacing, colours, sizes, unicode, doubled backslashes, math
delimiters, digit grouping that cannot be anything else, and final punctuation go; `\text` is left as the one wrapper
for words.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable

_UNICODE = {
    **{0xFF01 + offset: chr(0x21 + offset) for offset in range(0x5E)},
    **dict.fromkeys(map(ord, "\u2212\u2013\u2014\ufe63\u2010\u2011"), "-"),
    **dict.fromkeys(map(ord, "\u00a0\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f\u3000"), " "),
    **dict.fromkeys(map(ord, "\u200b\u200c\u200d\u2060\ufeff"), ""),
    **{
        ord(char): replacement
        for char, replacement in {
            "\u00d7": r"\times ",
            "·": r"\cdot ",
            "⋅": r"\cdot ",
            "÷": r"\div ",
            "±": r"\pm ",
            "∓": r"\mp ",
            "√": r"\sqrt ",
            "π": r"\pi ",
            "θ": r"\theta ",
            "∞": r"\infty ",
            "≤": r"\leq ",
            "≥": r"\geq ",
            "≠": r"\neq ",
            "≈": r"\approx ",
            "∈": r"\in ",
            "\u222a": r"\cup ",
            "∩": r"\cap ",
            "∅": r"\emptyset ",
            "°": r"^\circ ",
            "⁻": "^{-}",
        }.items()
    },
    **{ord(char): f"^{{{digit}}}" for digit, char in enumerate("⁰¹²³⁴⁵⁶⁷⁸⁹")},
    **{
        ord(char): rf"\frac{{{n}}}{{{d}}}"
        for char, n, d in [("½", 1, 2), ("¼", 1, 4), ("¾", 3, 4), ("⅓", 1, 3), ("⅔", 2, 3)]
    },
}

_WORDS = r"text(?:rm|normal|it|bf|tt|sf)?|math(?:rm|sf|tt)|mbox|hbox|operatorname\*?|emph"
_FONTS = r"mathbf|mathit|boldsymbol|bm|pmb|boxed|fbox|framebox|mathop|mathord"
_SWITCHES = (
    r"displaystyle|textstyle|scriptstyle|limits|nolimits|bf|rm|it|sf|tt|left|right|[bB]igg?[lrm]?|mleft|mright|strut"
)


# A power as Python writes it; other double stars are bold type.
_POWER = re.compile(r"(?<=[\w)\]}])(?:\*\*| \*\* )(?:(-?(?:\w|\.\d)+)|(?=\())")
_TAKES_PARENTHESES = re.compile(r"(?:\\sqrt(?:\[[^\[\]]*\])?|\^)\s*\(")


def _repeating(whole: str, fixed: str, period: str) -> str:
    """0.1 with 6 repeating is 15/90."""
    numerator = int((whole or "0") + fixed + period) - int((whole or "0") + fixed)
    return rf"\frac{{{numerator}}}{{{'9' * len(period) + '0' * len(fixed)}}}"


# Applied in order, each over the whole text.
_RULES: list[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]] = [
    (re.compile(r"\\left\s*\.|\\right\s*\."), ""),
    (re.compile(rf"\\(?:{_SWITCHES})(?![A-Za-z])\s*"), ""),
    (re.compile(r"\\(?:text)?color\s*\{[^{}]*\}|\\[hv]?phantom\s*\{[^{}]*\}|\\hspace\*?\s*\{[^{}]*\}"), ""),
    # Digit grouping that is written as such, before the spaces it is made of go.
    (re.compile(r"(?<=\d)\s*(?:,\s*\\!(?=\s*\d{3}(?!\d))|\\,|\\!|\{,\}(?=\d{3}(?!\d)))\s*(?=\d)"), ""),
    (re.compile(r"\\!"), ""),
    # Minerva has answers in Python: np.arcsin(10/13).
    (re.compile(r"(?<![A-Za-z\\.])(?:np|numpy|math)\.(?=[a-z])"), r"\\"),
    (
        re.compile(
            r"(?<!\\)\\(?:[,;:> ]|quad(?![A-Za-z])|qquad(?![A-Za-z])|enspace(?![A-Za-z])|thinspace(?![A-Za-z]))|~"
        ),
        " ",
    ),
    (re.compile(r"\{,\}"), ","),
    (re.compile(r"\\[dtc]frac(?![A-Za-z])"), r"\\frac"),
    (re.compile(r"\\(?:leqslant|le|leqq)(?![A-Za-z])|<="), r"\\leq "),
    (re.compile(r"\\(?:geqslant|ge|geqq)(?![A-Za-z])|>="), r"\\geq "),
    (re.compile(r"\\ne(?![A-Za-z])|!="), r"\\neq "),
    (re.compile(r"\\lt(?![A-Za-z])"), "<"),
    (re.compile(r"\\gt(?![A-Za-z])"), ">"),
    (re.compile(r"\\varnothing(?![A-Za-z])"), r"\\emptyset "),
    (re.compile(r"\\lbrace(?![A-Za-z])"), r"\\{"),
    (re.compile(r"\\rbrace(?![A-Za-z])"), r"\\}"),
    (re.compile(r"\\langle(?![A-Za-z])"), "("),
    (re.compile(r"\\rangle(?![A-Za-z])"), ")"),
    (re.compile(r"\\lbrack(?![A-Za-z])"), "["),
    (re.compile(r"\\rbrack(?![A-Za-z])"), "]"),
    (re.compile(r"\\colon(?![A-Za-z])"), ":"),
    (re.compile(r":=|=="), "="),
    (re.compile(r"\\(?:dots|ldots|cdots)(?![A-Za-z])"), "..."),
    (re.compile(r"\\text\{\s*[,;]?\s*(and|or)\s*\}"), r" \1 "),
    (re.compile(r"\\text\{\s*([-+\d.,\s]*)\}"), r"\1"),
    (re.compile(r"\\text\{\s*([eid])\s*\}"), r"\1"),
    (re.compile(r"(?<!\^)(?<!_)(?<!\})\{\s*\}(?!\{)"), ""),
    (re.compile(r"_\{\s*\\text\s*\{\s*([A-Za-z0-9]+)\s*\}\s*\}"), r"_{\1}"),
    (re.compile(r"_\{\s*\\([A-Za-z]+)\s*\}"), r"_{\1}"),
    (re.compile(r"\^\s*\\prime(?![A-Za-z])"), "'"),
    (re.compile(r"\^\{\s*((?:\\prime\s*)+)\}"), lambda match: "'" * match[1].count("p")),
    # A point that no digit follows: -1./3.
    (re.compile(r"(?<=\d)\.(?=\s*[-+*/^)}\]])"), ""),
    (re.compile(r"(\d*)\.(\d*)\\(?:overline|bar|dot)\{(\d+)\}"), lambda match: _repeating(*match.groups())),
    # TeX takes one token where braces are left out: \frac12, \frac1{2}, \frac{1}2, \sqrt3.
    (re.compile(r"\\frac\s*(\\pi(?![A-Za-z]))"), r"\\frac{\1}"),
    (re.compile(r"\\frac\s*([\dA-Za-z])"), r"\\frac{\1}"),
    (re.compile(r"(\\frac\s*\{[^{}]*\})\s*([\dA-Za-z])"), r"\1{\2}"),
    (re.compile(r"\\sqrt\s*([\dA-Za-z])"), r"\\sqrt{\1}"),
    (re.compile(r"\s+"), " "),
    # Blanks as grouping marks: all groups of three.
    (re.compile(r"(?<![\d.,])(\d{1,3})((?: \d{3})+)(?![\d])"), lambda match: match[1] + match[2].replace(" ", "")),
    # A mixed number on one line: 4 2/3.
    (re.compile(r"(?<![\d.,/])(\d+) (\d+)\s*/\s*(\d+)(?![\d.])"), r"\1\\frac{\2}{\3}"),
]


def undress(text: str) -> str:
    """The plain spelling of an answer; "" where nothing but typography was there."""
    text = re.sub("√([0-9]+)", r"\\sqrt{\1}", text).translate(_UNICODE)
    text = "".join(char for char in text if char in "\n\t" or unicodedata.category(char) != "Cc").strip()
    if "\\begin" not in text:
        # JSON-escaped text doubles every backslash; inside a matrix a doubled one ends the row.
        text = re.sub(r"\\\\(?=[A-Za-z{}%$,;!()\[\]])", r"\\", text)
    text = _POWER.sub(lambda match: f"^{{{match[1]}}}" if match[1] else "^", text)
    text = re.sub(r"\\?\$|(?<!\\)\\[()\[\]]|[€£`]|\*\*", " ", text)
    text = _unwrap(_unwrap(text, _FONTS, ""), _WORDS, r"\text")
    for pattern, replacement in _RULES:
        text = pattern.sub(replacement, text)
    return _without_ends(_braced(text))


def _braced(text: str) -> str:
    r"""Braces around what a root or a power takes in parentheses, \sqrt(19) and 2^((n+1)/2): math-verify looks for the
    first closing one, whichever it belongs to."""
    position = 0
    while (match := _TAKES_PARENTHESES.search(text, position)) is not None:
        position = match.end()
        if (end := _closing_parenthesis(text, match.end() - 1)) is not None:
            text = f"{text[: match.end() - 1]}{{{text[match.end() : end]}}}{text[end + 1 :]}"
    return text


def _closing_parenthesis(text: str, opening: int) -> int | None:
    depth = 0
    for index in range(opening, len(text)):
        depth += (text[index] == "(") - (text[index] == ")")
        if depth == 0:
            return index
    return None


def _without_ends(text: str) -> str:
    text = re.sub(r"^[\s=:]+|(?:\\\\|[\s.,;:])+$", "", text)
    while (inner := _inside(text, r"\text{")) is not None or (inner := _inside(text, "{")) is not None:
        text = inner.strip(" .")
    return text


def _inside(text: str, opening: str) -> str | None:
    """What the one group that spans the whole text holds."""
    if text.startswith(opening) and closing_brace(text, len(opening) - 1) == len(text) - 1:
        return text[len(opening) : -1]
    return None


def _unwrap(text: str, commands: str, wrapper: str) -> str:
    r"""`\command{...}` becomes `{...}` in `wrapper`, or its bare content where there is none."""
    pattern = re.compile(rf"\\(?:{commands})(?![A-Za-z])\s*\{{")
    position = 0
    while (match := pattern.search(text, position)) is not None:
        end = closing_brace(text, match.end() - 1)
        if end is None:
            position = match.end()
            continue
        content = text[match.end() : end]
        text = text[: match.start()] + (f"{wrapper}{{{content}}}" if wrapper else content) + text[end + 1 :]
        position = match.start() + len(wrapper) + (1 if wrapper else 0)
    return text


def closing_brace(text: str, opening: int) -> int | None:
    """The index of the brace that closes the one at `opening`."""
    depth = 0
    for token in re.compile(r"\\.|[{}]", re.DOTALL).finditer(text, opening):
        depth += {"{": 1, "}": -1}.get(token.group(), 0)
        if depth == 0:
            return token.start()
    return None
