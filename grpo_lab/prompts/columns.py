"""One row to one problem, as `dataset.columns` says."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from grpo_lab.config import ColumnsConfig, ConfigError
from grpo_lab.prompts.gold import READERS, RowFault
from grpo_lab.prompts.split import problem_id
from grpo_lab.types import Problem


def check_columns(columns: ColumnsConfig, key: str) -> None:
    """Refuse a mapping that no row could satisfy.

    Raises:
        ConfigError: an unknown kind of gold, kinds that do not pair with the answer columns, or bounds without score.
    """
    kinds = columns.gold.split("|")
    if unknown := [kind for kind in kinds if kind not in READERS]:
        raise ConfigError(f"{key}.columns.gold={unknown[0]} is unknown: it takes {', '.join(READERS)}")
    if len(kinds) not in (1, len(columns.answer.split("|"))):
        raise ConfigError(
            f"{key}.columns.gold={columns.gold} does not pair with {key}.columns.answer={columns.answer}: "
            "give one kind for all, or one for each"
        )
    bounded = columns.score_above is not None or columns.score_below is not None
    if bounded != (columns.score is not None):
        raise ConfigError(f"{key}.columns.score and its bounds go together: set {key}.columns.score and a bound")


def to_problem(values: Mapping[str, Any], columns: ColumnsConfig, source: str) -> Problem:
    """The problem in a row. `source` becomes a tag, so that a mixture's problems say where they are from.

    Raises:
        RowFault: a column is missing, or its value cannot be read.
        NoReference: the row has no answer by design.
    """
    question = " ".join(_text(values, name) for name in columns.question)
    if columns.strip_suffix is not None:
        question = question.removesuffix(columns.strip_suffix).rstrip()
    if not question:
        raise RowFault("the question is empty")
    tags = {"source": source}
    for name in (*columns.tags, *([columns.unit] if columns.unit else [])):
        tag = "unit" if name == columns.unit else name
        if (value := values.get(name)) is not None:
            tags[tag] = str(value)
    return Problem(
        id=problem_id(question),
        question=question,
        gold=_gold(values, columns),
        tolerance=_tolerance(values, columns),
        tags=tags,
    )


def score_is_inside(values: Mapping[str, Any], columns: ColumnsConfig) -> bool:
    """Whether the (mean) score of a row lies strictly between the bounds; True where none are set.

    Raises:
        RowFault: no score, or one that is neither a number nor a list of numbers.
    """
    if columns.score is None:
        return True
    _, score = _pick(values, columns.score)
    scores = score if isinstance(score, list | tuple) else [score]
    try:
        mean = math.fsum(map(float, scores)) / len(scores)
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise RowFault(f"the score {score!r} is neither a number nor a list of numbers") from error
    above = -math.inf if columns.score_above is None else columns.score_above
    below = math.inf if columns.score_below is None else columns.score_below
    return above < mean < below


def _pick(values: Mapping[str, Any], names: str) -> tuple[int, Any]:
    """The first of the alternatives `a|b` that the row has and that is not null, with its position.

    Where all that the row has are null, the first of those: null may mean something (a proof)."""
    present = [(position, values[name]) for position, name in enumerate(names.split("|")) if name in values]
    if not present:
        raise RowFault(f"there is no column {names.replace('|', ' or ')} (there are {', '.join(values) or 'none'})")
    return next((found for found in present if found[1] is not None), present[0])


def _text(values: Mapping[str, Any], names: str) -> str:
    """A question column: text, one chat message, or a list of them, of which the last user message counts."""
    _, value = _pick(values, names)
    messages = [value] if isinstance(value, Mapping) else value
    if isinstance(messages, list | tuple):
        asked = [message for message in messages if isinstance(message, Mapping) and _is_user(message)]
        if not asked:
            raise RowFault(f"column {names} holds no message of a user")
        value = asked[-1].get("content", asked[-1].get("value"))
    if not isinstance(value, str):
        raise RowFault(f"column {names} holds no text ({'null' if value is None else type(value).__name__})")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise RowFault(f"column {names} holds half a surrogate pair, which no tokenizer reads") from error
    return value.strip()


def _is_user(message: Mapping[str, Any]) -> bool:
    return message.get("role", message.get("from")) in ("user", "human")


def _gold(values: Mapping[str, Any], columns: ColumnsConfig) -> str:
    position, value = _pick(values, columns.answer)
    kinds = columns.gold.split("|")
    return READERS[kinds[position] if len(kinds) > 1 else kinds[0]](value)


def _tolerance(values: Mapping[str, Any], columns: ColumnsConfig) -> float | None:
    """The absolute error bound. A row, or a copy of the data set, without one has none."""
    value = values.get(columns.tolerance) if columns.tolerance else None
    if value is None or value == "":
        return None
    try:
        bound = float(value)
    except (TypeError, ValueError) as error:
        raise RowFault(f"the tolerance {value!r} is no number") from error
    if not (math.isfinite(bound) and bound >= 0):
        raise RowFault(f"the tolerance {value!r} is no finite number from 0 up")
    return bound
