"""The made task: sums such as `1234+5678`, worked out digit by digit. Nothing to download, a split that never moves.

A worked answer goes from the units up. Each place writes the operands' digits, the digit of the sum and the carry
out, so that the carry in is always the character just before; then comes `#` and the sum: `48+27` is worked out as
`8751` (8 + 7 = 5 carry 1), `4270` (4 + 2 + 1 = 7 carry 0), `#75`.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from grpo_lab.config import ArithmeticConfig, ConfigError
from grpo_lab.prompts.split import Split, is_held_out, problem_id
from grpo_lab.types import Problem

# Every character of a question, of a worked answer, and of the template "{question}=".
VOCABULARY: tuple[str, ...] = (*"0123456789", "+", "=", "#")

# The part of all sums that is held out. Membership goes by a hash of the question: it depends neither on the seed
# nor on how many problems are drawn, so a model trained on any draw has seen no test problem of any other.
TEST_SHARE = 1 / 16

_DRAW_AT_LEAST = 1024
_MAX_DRAWS = 64


def make_problems(config: ArithmeticConfig) -> Split:
    """Draw distinct sums until `train_problems` and `test_problems` are filled. Same config, same problems.

    The number of digits is drawn evenly from `min_digits` to `max_digits`; all operands of a sum have that many (the
    tag `digits`).

    Raises:
        ConfigError: a key out of range, or more problems asked for than there are.
    """
    _check(config)
    train: list[Problem] = []
    test: list[Problem] = []
    seen: set[str] = set()
    for batch in _draws(config):
        before = len(seen)
        for problem in batch:
            if problem.question in seen:
                continue
            seen.add(problem.question)
            if is_held_out(problem.id, TEST_SHARE):
                if len(test) < config.test_problems:
                    test.append(problem)
            elif len(train) < config.train_problems:
                train.append(problem)
        if len(train) == config.train_problems and len(test) == config.test_problems:
            report: dict[str, int | float | str] = {"source": "made", "train": len(train), "test": len(test)}
            return Split(train=train, test=test, report=report)
        if len(seen) == before:
            break
    raise ConfigError(
        f"dataset.train_problems={config.train_problems} and dataset.test_problems={config.test_problems} are too many:"
        f" only {len(train)} and {len(test)} were found; ask for fewer, or raise dataset.max_digits"
    )


def worked_answers(numbers: np.ndarray) -> list[str]:
    """Each row's sum worked out from the units up, then `#` and the sum (the format is at the top of this module).

    `numbers` is [n, operands] int64, not negative. A row has as many places as its largest operand.
    """
    places, carry, columns = len(str(numbers.max())), np.zeros(len(numbers), dtype=np.int64), []
    for place in range(places):
        digits = numbers // 10**place % 10
        carry, digit = np.divmod(digits.sum(axis=1) + carry, 10)
        columns += [digits, digit[:, None], carry[:, None]]
    # Every row is worked out to the longest row's places, and cut to its own.
    work = (np.concatenate(columns, axis=1) + ord("0")).astype(np.uint8)
    text, stride, width = work.tobytes().decode("ascii"), work.shape[1], numbers.shape[1] + 2
    return [
        f"{text[start : start + width * len(str(largest))]}#{total}"
        for start, largest, total in zip(
            range(0, len(text), stride), numbers.max(axis=1).tolist(), numbers.sum(axis=1).tolist(), strict=True
        )
    ]


def _check(config: ArithmeticConfig) -> None:
    # One digit holds a carry up to ten operands; 17 digits keep ten operands' bounds inside 64 bits.
    if not 2 <= config.operands <= 10:
        raise ConfigError(f"dataset.operands={config.operands} is out of range: it takes 2 to 10")
    if not 1 <= config.min_digits <= config.max_digits <= 17:
        raise ConfigError(
            f"dataset.min_digits={config.min_digits} and dataset.max_digits={config.max_digits} do not fit: "
            "1 <= min_digits <= max_digits <= 17"
        )
    if config.train_problems < 1 or config.test_problems < 0:
        raise ConfigError(
            f"dataset.train_problems={config.train_problems} and dataset.test_problems={config.test_problems}: "
            "at least 1 and 0 are needed"
        )
    if config.data_seed < 0:
        raise ConfigError(f"dataset.data_seed={config.data_seed} is negative: it takes 0 and up")


def _draws(config: ArithmeticConfig) -> Iterator[list[Problem]]:
    """Batches of problems, repeats included, each batch large enough to fill a big part of what is wanted."""
    rng = np.random.Generator(np.random.Philox(key=config.data_seed))
    # A tenth more than wanted: some draws fall on the full side of the split.
    size = max(int(1.1 * (config.train_problems + config.test_problems)), _DRAW_AT_LEAST)
    for _ in range(_MAX_DRAWS):
        digits = rng.integers(config.min_digits, config.max_digits, size=(size, 1), endpoint=True)
        # One-digit numbers include 0; longer ones do not start with it.
        low = np.where(digits == 1, 0, 10 ** (digits - 1))
        numbers = rng.integers(low, 10**digits, size=(size, config.operands))
        totals = numbers.sum(axis=1).tolist()
        answers = worked_answers(numbers) if config.scratchpad else [f"#{total}" for total in totals]
        tags = {level: {"digits": str(level)} for level in range(config.min_digits, config.max_digits + 1)}
        yield [
            Problem(id=problem_id(question), question=question, gold=str(total), solution=answer, tags=tags[level])
            for question, total, answer, level in zip(
                ("+".join(map(str, row)) for row in numbers.tolist()),
                totals,
                answers,
                digits[:, 0].tolist(),
                strict=True,
            )
        ]
