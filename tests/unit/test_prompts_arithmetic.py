"""The made task: right, repeatable, and split by the question alone."""

from __future__ import annotations

import dataclasses
import re
import time
from typing import Any

import numpy as np
import pytest

from grpo_lab.config import ArithmeticConfig, ConfigError
from grpo_lab.prompts import load_problems
from grpo_lab.prompts.arithmetic import VOCABULARY, worked_answers
from grpo_lab.types import Problem

FOUR_DIGITS = ArithmeticConfig(
    kind="arithmetic",
    name="arithmetic",
    template="{question}=",
    min_digits=4,
    max_digits=4,
    operands=2,
    scratchpad=True,
    train_problems=2000,
    test_problems=100,
    data_seed=0,
)


def changed(**changes: Any) -> ArithmeticConfig:
    return dataclasses.replace(FOUR_DIGITS, **changes)


@pytest.mark.parametrize(
    ("numbers", "answer"),
    [
        # 8+7 = 5 carry 1; 4+2+1 = 7 carry 0.
        ((48, 27), "87514270#75"),
        # 9+1 = 0 carry 1; 9+0+1 = 0 carry 1, twice: a digit more than the operands have.
        ((999, 1), "910190019001#1000"),
        ((0, 0), "0000#0"),
        # 9+9+9 = 7 carry 2; 9+9+9+2 = 9 carry 2.
        ((99, 99, 99), "9997299992#297"),
    ],
)
def test_worked_answers_by_hand(numbers: tuple[int, ...], answer: str) -> None:
    assert worked_answers(np.array([numbers])) == [answer]


def test_rows_of_several_lengths_are_worked_out_side_by_side() -> None:
    assert worked_answers(np.array([[48, 27], [5, 7], [0, 999]])) == ["87514270#75", "5721#12", "099009900990#999"]


def check_by_the_rules(problem: Problem) -> None:
    """Read the worked answer as a reader would: its columns must be the question's, its carries must chain."""
    operands = problem.question.split("+")
    assert problem.gold == str(sum(int(operand) for operand in operands))
    assert problem.solution is not None
    work, answer = problem.solution.split("#")
    assert answer == problem.gold
    width = len(operands) + 2
    places = re.findall("." * width, work)
    assert "".join(places) == work
    carry, digits = 0, ""
    for position, place in enumerate(places, 1):
        column = [int(character) for character in place[:-2]]
        assert column == [int(operand[-position]) for operand in operands]
        assert 10 * int(place[-1]) + int(place[-2]) == sum(column) + carry
        carry, digits = int(place[-1]), place[-2] + digits
    assert int(f"{carry}{digits}") == int(problem.gold)


@pytest.mark.parametrize("operands", [2, 3, 10])
def test_every_worked_answer_is_right(operands: int) -> None:
    split = load_problems(changed(operands=operands, min_digits=2, max_digits=5, train_problems=500, test_problems=50))
    for problem in split.train + split.test:
        check_by_the_rules(problem)


def test_four_digit_answers_are_short_and_spelt_in_the_vocabulary() -> None:
    split = load_problems(FOUR_DIGITS)
    assert {len(problem.solution or "") for problem in split.train} == {21, 22}
    characters = {
        character
        for problem in split.train + split.test
        for character in FOUR_DIGITS.template.replace("{question}", problem.question) + (problem.solution or "")
    }
    assert characters == set(VOCABULARY)
    assert len(VOCABULARY) == 13


def test_without_scratchpad_the_answer_stands_alone() -> None:
    problem = load_problems(changed(scratchpad=False)).train[0]
    assert problem.solution == f"#{problem.gold}"


def test_sizes_levels_and_distinct_problems() -> None:
    split = load_problems(changed(min_digits=2, max_digits=4))
    assert (len(split.train), len(split.test)) == (2000, 100)
    assert (split.report["train"], split.report["test"]) == (2000, 100)
    assert len({problem.question for problem in split.train + split.test}) == 2100
    assert len({problem.id for problem in split.train + split.test}) == 2100
    shares = {level: sum(problem.tags["digits"] == level for problem in split.train) / 2000 for level in "234"}
    assert all(0.25 < share < 0.42 for share in shares.values())
    for problem in split.train:
        assert {str(len(operand)) for operand in problem.question.split("+")} == {problem.tags["digits"]}


def test_equal_configs_make_equal_problems_and_seeds_differ() -> None:
    first, again, other = (load_problems(changed(data_seed=seed)) for seed in (0, 0, 1))
    assert first.train == again.train
    assert first.test == again.test
    assert first.train != other.train


def test_no_draw_trains_on_another_draws_test_problem() -> None:
    """Three digits have 810,000 sums, so draws do meet: 40,000 training problems cover a twentieth of them."""
    one = load_problems(changed(min_digits=3, max_digits=3, train_problems=20_000, test_problems=2000))
    two = load_problems(changed(min_digits=3, max_digits=3, train_problems=40_000, test_problems=1000, data_seed=7))
    train_one, test_one = ({problem.id for problem in side} for side in (one.train, one.test))
    train_two, test_two = ({problem.id for problem in side} for side in (two.train, two.test))
    assert train_one & train_two
    assert test_one & test_two
    assert not train_one & (test_one | test_two)
    assert not train_two & (test_one | test_two)


def test_a_small_space_can_be_used_up_and_no_further() -> None:
    """One-digit sums are 100: with all asked for, the two sides are all of them."""
    one_digit = changed(min_digits=1, max_digits=1)
    with pytest.raises(ConfigError, match=r"only (\d+) and (\d+) were found") as caught:
        load_problems(one_digit)
    found = re.search(r"only (\d+) and (\d+) were found", str(caught.value))
    assert found is not None
    train, test = int(found[1]), int(found[2])
    assert train + test == 100
    split = load_problems(dataclasses.replace(one_digit, train_problems=train, test_problems=test))
    assert {problem.question for problem in split.train + split.test} == {
        f"{a}+{b}" for a in range(10) for b in range(10)
    }


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"operands": 1}, "operands"),
        ({"operands": 11}, "operands"),
        ({"min_digits": 0}, "min_digits"),
        ({"min_digits": 5}, "min_digits"),
        ({"max_digits": 18}, "max_digits"),
        ({"train_problems": 0}, "train_problems"),
        ({"test_problems": -1}, "test_problems"),
        ({"data_seed": -1}, "data_seed"),
    ],
)
def test_keys_out_of_range_are_named(changes: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=rf"dataset\.{key}"):
        load_problems(changed(**changes))


def test_the_longest_numbers_stay_exact() -> None:
    split = load_problems(changed(min_digits=17, max_digits=17, operands=10, train_problems=20, test_problems=2))
    for problem in split.train:
        check_by_the_rules(problem)


def test_a_full_size_draw_is_quick() -> None:
    """0.7 s of processor time when this was written. The bound leaves room for coverage and slow machines: it is there
    for a change of order."""
    started = time.process_time()
    assert len(load_problems(changed(train_problems=100_000)).train) == 100_000
    assert time.process_time() - started < 10
