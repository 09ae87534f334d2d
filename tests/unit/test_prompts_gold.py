"""The reference answer keeps the value that the file has."""

from __future__ import annotations

from decimal import Decimal

import pytest

from grpo_lab.prompts.gold import NoReference, RowFault, after_hash, every_member, last_box, nested, number, plain


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("033", "033"),
        (33, "33"),
        (0.5, "0.5"),
        (Decimal("0.50"), "0.50"),
        (Decimal("1E+2"), "100"),
        (1e-07, "0.0000001"),
        (123456789012345678901234567890, "123456789012345678901234567890"),
        (10**400, f"1{'0' * 400}"),
        ("  \\frac{1}{2} ", "\\frac{1}{2}"),
        (["2", 5], "2, 5"),
    ],
)
def test_plain_keeps_the_value(value: object, text: str) -> None:
    assert plain(value) == text


@pytest.mark.parametrize("value", ["", "   ", None, True, {"a": 1}, float("nan"), float("inf"), ["2", ""], ["2", None]])
def test_plain_refuses_what_is_no_answer(value: object) -> None:
    with pytest.raises(RowFault, match="the gold answer is"):
        plain(value)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("60/3=<<60/3=20>>20, so 80.\n#### 80", "80"),
        ("80.\n####80", "80"),
        ("It falls.\n#### -3", "-3"),
        ("#### 18\nLet me redo that.\n#### 20", "20"),
        ("#### 1,234,567", "1234567"),
        ("#### (1,2)", "(1,2)"),
    ],
)
def test_after_hash(value: str, text: str) -> None:
    assert after_hash(value) == text


@pytest.mark.parametrize("value", ["the answer is 18", "work\n#### ", 18])
def test_after_hash_needs_a_mark_and_an_answer(value: object) -> None:
    with pytest.raises(RowFault, match="####"):
        after_hash(value)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("so \\boxed{371}$.", "371"),
        ("\\boxed{1} and then \\boxed{\\frac{1}{\\sqrt{2}}}", "\\frac{1}{\\sqrt{2}}"),
        # The last one is cut off: the one before it counts.
        ("\\boxed{7}, or \\boxed{\\frac{1}{2}", "7"),
        # Escaped braces are text.
        ("\\boxed{\\{1, 2\\}}", "\\{1, 2\\}"),
        ("\\boxed {5} and \\fbox{6}", "6"),
    ],
)
def test_last_box(value: str, text: str) -> None:
    assert last_box(value) == text


@pytest.mark.parametrize("value", ["no box", "\\boxed{1", "\\boxed{ }"])
def test_last_box_refuses(value: str) -> None:
    with pytest.raises(RowFault, match="box"):
        last_box(value)


def test_every_member_of_a_list_is_kept() -> None:
    assert every_member(["$2$,$5$"]) == "$2$,$5$"
    assert every_member(["2", "500"]) == "2, 500"
    assert every_member("7") == "7"


def test_a_null_list_is_a_proof_and_an_empty_one_a_fault() -> None:
    with pytest.raises(NoReference):
        every_member(None)
    with pytest.raises(RowFault, match="empty list"):
        every_member([])


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (14.0, "14"),
        (Decimal("14.0"), "14"),
        ("145.0", "145"),
        (0.5, "0.5"),
        (Decimal("0.50"), "0.5"),
        (100, "100"),
        ("1,200", "1200"),
        (-0.0, "0"),
        (Decimal("123456789012345678901234567890.0"), "123456789012345678901234567890"),
    ],
)
def test_number(value: object, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize("value", ["seven", "Infinity", "NaN", ""])
def test_number_refuses(value: str) -> None:
    with pytest.raises(RowFault, match="the gold answer"):
        number(value)


def test_nested_ground_truth() -> None:
    assert nested({"style": "rule", "ground_truth": "\\frac{1}{2}"}) == "\\frac{1}{2}"
    assert nested({"from": "assistant", "ground_truth": {"value": "24"}}) == "24"


@pytest.mark.parametrize("value", ["24", {"style": "rule"}, {"ground_truth": {"text": "24"}}, {"ground_truth": None}])
def test_nested_refuses(value: object) -> None:
    with pytest.raises(RowFault, match="the gold answer"):
        nested(value)
