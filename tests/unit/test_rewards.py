r"""Verdicts on single responses: what counts as the answer, and what counts as equal."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from grpo_lab.rewards import judge_exact, judge_math, reward
from grpo_lab.rewards.compare import compare
from grpo_lab.rewards.dress import undress
from grpo_lab.rewards.extract import final_answer
from grpo_lab.rewards.judge import quick_verdict
from grpo_lab.rewards.shape import read, values
from grpo_lab.rewards.written import read_written
from grpo_lab.types import Judgement

ROOT = Path(__file__).resolve().parents[2]
DATA = Path(os.environ.get("GRPO_LAB_TEST_DATA", ROOT.parent / "shared" / "data"))
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="GRPO_LAB_TEST_DATA names no folder")

quick_examples = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DATA / name).read_text().splitlines()]


def verdict(gold: str, answer: str) -> str:
    return judge_math(gold, rf"So the answer is $\boxed{{{answer}}}$.").verdict


# --- which text is the answer -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        (r"It is \boxed{42}.", "42"),
        (r"$\boxed{\frac{1}{\sqrt{2}}}$", r"\frac{1}{\sqrt{2}}"),
        (r"\boxed{1}, no: \boxed{2}", "2"),
        (r"\boxed{2} and \boxed{3}", "3"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed{\boxed{6}}", r"\boxed{6}"),
        (r"\fbox{42}", "42"),
        (r"\framebox{42}", "42"),
        (r"\boxed {42}", "42"),
        (r"The answer is $\boxed 2$.", "2"),
        (r"The answer is \boxed\frac{1}{2}.", r"\frac{1}{2}"),
        (r"\\boxed{42}", "42"),
        (r"\boxed{5} Note that \boxed{", "5"),
        (r"\boxed{x \boxed{7}", "7"),
        ("} stray { \\boxed{5}", "5"),
        ("First\n#### 18\nagain\n#### 20", "20"),
        ("#### 1,080", "1,080"),
        ("####80", "80"),
        ("####\n-3", "-3"),
        ("#### 7\n\nDone.", "7"),
        (r"\boxed{1} then" + "\n#### 2", "2"),
        ("#### 2\nno, " + r"\boxed{1}", "1"),
        (r"#### The result is \boxed{3}", "3"),
        (r"So it is \boxed{5}." + "\n\n#### Check\n2+3=5", "5"),
        (r"\boxed{5} ####", "5"),
        (r"\boxed{5}" + "\n#### -7", "-7"),
        (r"\boxed{5}" + "\n#### $7", "$7"),
        ("#### east", "east"),
        (r"\boxed{a #### b}", "a #### b"),
        (r"<think>\boxed{1}</think> \boxed{2}", "2"),
        (r"\boxed{2} <think>\boxed{1}", "2"),
        (r"<think>\boxed{1}</think> none", None),
        (r"<think> I say \boxed{1}", None),
        (r"\boxed{42", None),
        (r"\boxed{}", None),
        (r"\boxed{5} and \boxed{ }", None),
        (r"The answer is \boxed", None),
        (r"\Boxed{42}", None),
        (r"\boxedtext{42}", None),
        ("The answer is 42.", None),
        ("42", None),
        ("##### 42", None),
        ("####", None),
        ("", None),
    ],
)
def test_last_marked_answer_counts(completion: str, answer: str | None) -> None:
    assert final_answer(completion) == answer


@pytest.mark.parametrize(
    "noise", [r"\boxed{" * 15_000, "{" * 100_000, "#" * 100_000, r"\boxed x" * 15_000, "\\" * 99_999]
)
def test_extraction_is_linear_in_noise(noise: str) -> None:
    # A quadratic scan of 100 kB takes minutes; the suite's own time limit ends that.
    assert final_answer(noise + r"\boxed{5}") == "5"


def test_judgement_holds_the_extracted_text() -> None:
    assert judge_math("1/2", r"\boxed{ \frac12 }") == Judgement(verdict="correct", extracted=r"\frac12")
    assert judge_math("1/2", "none") == Judgement(verdict="unparsed", extracted=None)


def test_reward_is_one_for_correct_only() -> None:
    rewards = {name: reward(Judgement(verdict=name)) for name in ("correct", "wrong", "unparsed", "timeout", "error")}
    assert rewards == {"correct": 1.0, "wrong": 0.0, "unparsed": 0.0, "timeout": 0.0, "error": 0.0}


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("12+30=#42", Judgement(verdict="correct", extracted="42")),
        ("carry 1 # 4 # 42 \n", Judgement(verdict="correct", extracted="42")),
        ("#042", Judgement(verdict="wrong", extracted="042")),
        ("#42#", Judgement(verdict="wrong", extracted="")),
        ("42", Judgement(verdict="unparsed", extracted=None)),
    ],
)
def test_exact_kind_compares_the_text_after_the_last_hash(completion: str, expected: Judgement) -> None:
    assert judge_exact("42", completion) == expected


# --- what is equal: the policy of docs/verifier.md ----------------------------------------------------------------

EQUAL = r"""
np.arcsin(10/13) | \arcsin(10/13)
np.arcsin(10/13) | \arcsin\left(\frac{10}{13}\right)
6 | 2(3)
6 | (2)(3)
24 | 2 (3)(4)
\frac23 | 2\left(\frac13\right)
18 | 2(3)^2
30 | \binom{5}{2}\binom{3}{1}
5 | \binom{5}{2}\frac12
\frac73 | 2\frac13
3 | \log_2(8)
50\% | 50
50 | 50\%
0.5 | 50\%
50\% | 0.5
12.5\% | \frac{1}{8}
\frac{3}{4} | 75 percent
4.5e33 | 4.5 \times 10^{33}
3e8 | 3\cdot10^8
3e8 | 300000000
3e8 | 3 \times 10^{8} \text{ m/s}
.0000672 | 6.72 \times 10^{-5}
1e-5 | 10^{-5}
5 cm | 5
5 | 5\,\mathrm{cm}
5 | 5 cm^2
5 | 5 m
18 | 18 apples
6m | 6m
\$18.90 | 18.9
\frac{270}7\text{ degrees} | \frac{270}{7}^\circ
90^\circ | 90
(45^{\circ}, 60^{\circ}) | (45,60)
864 \mbox{ inches}^2 | 864
52_8 | 52_{8}
52_8 | 52
\text{(C)} | C
\text{Evelyn} | evelyn
\text{no solution} | No solution
M - m | M-m
3R^2 | 3r^2
\begin{pmatrix} -2 \\ -14 \end{pmatrix} | \begin{bmatrix} -2 \\ -14 \end{bmatrix}
\begin{pmatrix} -2 \\ -14 \end{pmatrix} | (-2,-14)
(-\infty, 2) \cup (3, \infty) | (3,\infty)\cup(-\infty,2)
(-\infty, 2) \cup (3, \infty) | x<2 \text{ or } x>3
x \in [-2,7] | [-2,7]
[-2,7] | -2 \leq x \leq 7
x>2 | (2,\infty)
k \geqslant 2 | k\ge 2
\{1,2,2\} | \{1,2\}
\{5\} | 5
5 | \{5\}
2x+y=5 | y=5-2x
\{1\pm\sqrt{5},-2\} | \{-2, 1+\sqrt5, 1-\sqrt5\}
(\pm 1, 2) | (1,2), (-1,2)
a \pm b \mp c | a+b-c, a-b+c
3, 5, 7 | 7,5,3
2, 5 | x=2 \text{ or } x=5
x=1, y=2 | y=2,x=1
x=1, y=2 | 1,2
(1,8,19), (2,7,13) | (2,7,13),(1,8,19)
(1,2) | \langle 1, 2\rangle
(1,2) | 1, 2
(1,2) | (x,y)=(1,2)
2:3:4 | 2:3:4
10,\!080 | 10080
58,500 | 58\,500
58,500 | 58 500
100,200 | 200,100
\frac43 | 1 1/3
137 \frac{1}{2} | 137.5
\frac{\pi}{2} | \frac\pi2
\sqrt{12} | 2√3
x^2 | x²
x^2+2x+1 | (x+1)^2
(a+5)(b+2) | ab+2a+5b+10
\cot x | \frac{\cos x}{\sin x}
\sqrt{45x^3} | 3x\sqrt{5x}
\binom{2n}{n} | \frac{(2n)!}{(n!)^2}
\lceil n / 2\rceil+1 | \lfloor (n+1)/2 \rfloor + 1
2^{1009} | 2^{1010}/2
m_{p}(\gamma^{2}-1) | m_p\gamma^2-m_p
E_{1}+E_{2} | E_2+E_1
y^{\prime}+r y=0 | y'+ry=0
m \frac{d v}{d t}+b v=f | b v + m \frac{d v}{d t} = f
5x - 7y + 4 = 0 | -5x+7y-4=0
y = -2x | 2x+y=0
f(x)=2 x | 2x
m_{\max}=n^{2}-n | n^2-n
x=5 | x\approx 5
\sqrt{19} | \sqrt{19}\approx 4.36
12 | x=3\cdot 4=12
104 | m+n = 104
0.5 = \frac{1}{2} | 0.5
i | \sqrt{-1}
6+9i | 9i+6
0.1\overline{6} | 1/6
\sqrt{2} | 1.41421356
\frac{200}{3} | 66.666667
4.333333333333333 | \frac{13}{3}
4.333333333333333 | 4.333333
\int_0^1 x dx | \frac12
\emptyset | \{\}
\sqrt{19} | √(19)
\sqrt{19} | \sqrt(19)
2\sqrt{3} | 2√(3)
2^{\frac{n+1}{2}} | 2^((n+1)/2)
(x+1)^2 | (x+1)**2
1024 | 2**10
2^{n+1} | 2 ** (n+1)
2^{n+1} | 2**(n+1)
5 | **5**
30 | 30°C
30 | 30^\circ C
30^\circ \text{C} | 30
90^\circ | 90°
2nm | 2mn
\frac{3}{2} m g | 1.5mg
12 cm | 12cm
3 mg | 3
3 | 3mg
3 mg | 3mg
18 dollars | 18
|ab| | |a||b|
3.14 | \approx 3.14
\approx 3.14 | 3.14
1,\!234,\!567 | 1234567
"""

UNEQUAL = r"""
np.arcsin(10/13) | \arcsin(10/12)
0.5 | 0.5\%
\frac{1}{2} | 0.5\%
50\% | 5000
4.5e33 | 4.5e34
6m | 6
52 | 52_8
52_8 | 52_9
\text{even} | neve
\text{(C)} | B
M - m | 0
M - m | m - M
\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix} | \begin{pmatrix} 1 & 3 \\ 2 & 4 \end{pmatrix}
(0,9) \cup (9,36) | (0,36)
(3,4] | [3,4]
(3,4] | 3 < x < 4
x>0.00000000000003 | x>0.00000000000004
\{1\pm\sqrt{5},-2\} | \{-2, 1+\sqrt5\}
\{1,2\} | \{1,2,3\}
1, 2 | \{1\}
\emptyset | \{0\}
3, 5, 7 | 3,5
x=1, y=2 | 2,1
(1,8,19), (2,7,13) | (2,7,13),(19,8,1)
(1,2) | 2,1
2:3:4 | 2:3:5
.0000672 | 0.000067
\cot x | \tan x
\lfloor x \rfloor | x
\lfloor\sqrt{n-1}\rfloor | \lfloor\sqrt{n-3}\rfloor
|x| | x
y^{\prime}+r y=0 | y+ry=0
m \frac{d v}{d t}+b v=f | m \frac{d v}{d q}+b v=f
5x - 7y + 4 = 0 | 5x - 7y - 4 = 0
x+y=5 | 5
x=5 | x+1
n=4,5 | m=4,5
\{1,2\} | 1<x<2
1, 2 | 1<x<2
2:3:4 | x>2
5 | 5 mod 3
(-\infty, 2) \cup (3, \infty) | x<2 \text{ or } x>4
x=y=z | x=y=w
12 | 3\cdot5=12
0 | x^2-x=0
p - q | q-p
\sqrt{2} | 1.414
\frac{1}{8} | 0.12500001
1-10^{-9} | 1.000000
4.333333333333333 | 4.33
\sqrt{2} | \sqrt{2} + 10^{-100}
\infty | -\infty
5 | 2(3)
\frac73 | 2(\frac13)
7 | 4(3)
\int_0^1 x dx | \frac13
2rs | 2
\frac{1}{2}mg | \frac{1}{2}
4 | 4sinx
3abcd | 3
a+b+|c| | a+b+c
a+b+c+|d| | a+b+c-d
a+b+c+|d| | a+b+c+d
|ab| | -ab
|ab| | ab
(1,2) | 12
(x+1)^2 | (x+1)2
(x+1)^2 | 2x+2
1024 | 2*10
\sqrt{19} | √(18)
"""


def _pairs(table: str) -> list[tuple[str, str]]:
    rows = [row.rpartition(" | ") for row in table.strip().splitlines()]
    return [(gold, answer) for gold, _, answer in rows]


@pytest.mark.parametrize(("gold", "answer"), _pairs(EQUAL))
def test_equal_answers_are_correct(gold: str, answer: str) -> None:
    assert verdict(gold, answer) == "correct"


def test_a_gold_that_cannot_be_read_is_met_by_its_own_text_in_any_dress() -> None:
    assert verdict("$t(0,4]$", "t(0,4]") == "correct"
    assert verdict("$t(0,4]$", r"\left. t (0,\,4] \right.") == "correct"
    assert verdict("$t(0,4]$", "t(0,5]") == "error"
    assert verdict(r"$\frac{1}{0}$", r"\frac{1}{0}") == "error"


@pytest.mark.parametrize(("gold", "answer"), _pairs(UNEQUAL))
def test_unequal_answers_are_wrong(gold: str, answer: str) -> None:
    assert verdict(gold, answer) == "wrong"


@pytest.mark.parametrize("answer", ["5 5", "?", "...", r"\frac{}{}", r"\unknown{5}", r"\left( 5", "6," * 130 + "6"])
def test_unreadable_answers_are_unparsed(answer: str) -> None:
    assert verdict("6", answer) == "unparsed"


def test_a_font_command_that_is_never_closed_is_unparsed() -> None:
    assert judge_math("6", r"#### \mathbf{5").verdict == "unparsed"


@pytest.mark.parametrize("answer", ["{" * 60 + "5" + "}" * 60, "5+" * 2000 + "5", "x" * 100_000])
def test_oversized_answers_are_unparsed_without_parsing(answer: str) -> None:
    assert verdict("6", answer) == "unparsed"


@pytest.mark.parametrize("gold", ["", r"\frac{1}{0}", r"\sqrt", r"\mystery{5}", "$t(0,4]$", "$"])
def test_gold_that_cannot_be_parsed_is_an_error(gold: str) -> None:
    finding = compare(gold, "5")
    assert finding.verdict == "error"
    assert finding.reason is not None
    assert "gold answer" in finding.reason


def test_undefined_gold_is_an_error_even_against_itself() -> None:
    assert verdict(r"\frac{1}{0}", r"\frac{1}{0}") == "error"


def test_answers_that_sympy_refuses_are_no_error() -> None:
    # More digits than Python turns into text: a ValueError inside sympy.
    assert verdict("5", r"\lfloor 10^{6000} \pi \rfloor") in ("wrong", "unparsed")


def test_a_fault_in_the_comparison_is_an_error_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> bool:
        raise KeyError("lost")

    monkeypatch.setattr("grpo_lab.rewards.compare.same", broken)
    assert compare("1/2", "2/3") == ("error", "KeyError while comparing: 'lost'")


def test_running_out_of_memory_is_a_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    def huge(*_: Any) -> bool:
        raise MemoryError

    monkeypatch.setattr("grpo_lab.rewards.compare.same", huge)
    assert compare("1/2", "2/3").verdict == "timeout"


@pytest.mark.parametrize(
    ("gold", "answer", "tolerance", "expected"),
    [
        ("4.2", "4.3", 0.1, "correct"),  # the bound itself is within
        ("4.2", "4.31", 0.1, "wrong"),
        ("4.2", r"\frac{17}{4}", 0.1, "correct"),
        ("4.2", r"\frac{9}{2}", 0.1, "wrong"),
        (r"\sqrt{2}", "1.4", 0.02, "correct"),
        (r"\sqrt{2}", "1.4", 0.01, "wrong"),
        ("4.2, 7", "7.05, 4.2", 0.1, "correct"),
        ("2x", "2.01x", 0.1, "wrong"),
        ("100", "100.5", None, "wrong"),
    ],
)
def test_stated_tolerance_bounds_the_absolute_error(
    gold: str, answer: str, tolerance: float | None, expected: str
) -> None:
    assert judge_math(gold, rf"\boxed{{{answer}}}", tolerance).verdict == expected


@pytest.mark.parametrize(
    ("gold", "answer", "expected"),
    [
        ("18", "18", "correct"),
        ("18", "18.00", "correct"),
        ("18", "$18", "correct"),
        ("1234", "1,234", "correct"),
        ("033", "33", "correct"),
        ("-0", "0", "correct"),
        ("0.1", ".1", "correct"),
        ("0.0000003", "0.0000004", "wrong"),
        ("1000000.1", "1000000.2", "wrong"),
        ("9" * 1999, "9" * 1998 + "8", "wrong"),
        ("9" * 5000, "8" * 5000, None),  # more digits than Python reads
        ("x+1", "x+1", "correct"),
        ("1/0", "1/0", None),
        ("18", "18 dollars", None),
        ("18", r"\frac{36}{2}", None),
        ("1.5", "1,5", None),
        ("1,234", "1,235", None),
        ("1234", "1,235", "wrong"),
        ("", "", None),
    ],
)
def test_quick_verdict_settles_plain_numbers_and_equal_texts(gold: str, answer: str, expected: str | None) -> None:
    assert quick_verdict(gold, answer, None) == expected


def test_written_numbers_know_their_precision() -> None:
    third = Fraction(1, 3)
    assert read_written("0.333333").rounds(third)  # type: ignore[union-attr]
    assert not read_written("0.33333").rounds(third)  # type: ignore[union-attr]  # five digits
    assert not read_written("0.333335").rounds(third)  # type: ignore[union-attr]
    assert read_written("0.666666").rounds(2 * third)  # type: ignore[union-attr]  # cut off
    assert not read_written("0.666668").rounds(2 * third)  # type: ignore[union-attr]
    assert not read_written("333333").rounds(Fraction(1_000_000, 3))  # type: ignore[union-attr]  # whole numbers are exact


def test_importing_and_plain_judging_load_neither_torch_nor_the_parser() -> None:
    code = (
        "import sys; from grpo_lab.rewards import judge_math, Verifier; "
        "assert judge_math('18', '#### 18').verdict == 'correct'; "
        "print([name for name in ('torch', 'sympy', 'math_verify', 'transformers') if name in sys.modules])"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT).stdout
        == "[]\n"
    )


# --- recorded pairs -----------------------------------------------------------------------------------------------


def _fault_pairs() -> list[Any]:
    if not DATA.is_dir():
        return []
    inputs = [(row["id"], row["input"]) for row in rows("field_faults.jsonl") if isinstance(row["input"], dict)]
    return [pytest.param(pair, id=f"{name}-{pair['n']}") for name, data in inputs for pair in data.get("pairs", [])]


@needs_data
@pytest.mark.parametrize("pair", _fault_pairs())
def test_recorded_faults(pair: dict[str, Any]) -> None:
    """Firm and soft pairs alike: the policy agrees with every one of them."""
    judgement = judge_math(pair["gold"], pair["completion"])
    assert (judgement.verdict == "correct") == (pair["expected"] == "correct")


@needs_data
def test_recorded_faults_are_all_there() -> None:
    pairs = [pair.values[0] for pair in _fault_pairs()]
    assert len(pairs) == 231
    assert sum(pair["firm"] for pair in pairs) == 183


@needs_data
def test_reference_solutions_of_math500_are_correct() -> None:
    failed = [
        row["unique_id"]
        for row in rows("math500.jsonl")[::4]
        if judge_math(row["answer"], row["solution"]).verdict != "correct"
    ]
    assert failed == []


@needs_data
def test_gsm8k_answers_are_read_from_their_own_solutions() -> None:
    for row in rows("gsm8k_test.jsonl"):
        gold = row["answer"].rpartition("####")[2].strip()
        assert judge_math(gold, row["answer"]).verdict == "correct"
        assert judge_math(gold + "1", row["answer"]).verdict == "wrong"


@needs_data
def test_olympiad_golds_hold_for_themselves_and_not_for_the_next() -> None:
    golds = [", ".join(row["final_answer"]) for row in rows("olympiadbench.jsonl")[::12]]
    golds.remove("$t(0,4]$")  # its left end is a name: no interval, no product
    for gold, other in itertools.pairwise(golds):
        assert compare(gold, gold + " ").verdict == "correct"
        if undress(gold) != undress(other):
            assert compare(gold, other).verdict in ("wrong", "unparsed")


# --- properties ---------------------------------------------------------------------------------------------------

GOLDS = st.sampled_from(["7", "-12", "3.5", r"\frac{3}{7}", r"2\sqrt{3}", "x^2+1", "(1,2)", r"\text{east}", "1, -2"])
PROSE = st.text(alphabet=st.characters(blacklist_characters="\\#<>{}", blacklist_categories=("Cs",)), max_size=60)


@quick_examples
@given(gold=GOLDS, before=PROSE, after=PROSE)
def test_a_boxed_gold_is_correct_in_any_prose(gold: str, before: str, after: str) -> None:
    assert judge_math(gold, f"{before}\\boxed{{{gold}}}{after}").verdict == "correct"


@quick_examples
@given(gold=GOLDS, prose=PROSE)
def test_a_wrong_later_box_makes_it_wrong(gold: str, prose: str) -> None:
    assert judge_math(gold, f"\\boxed{{{gold}}} {prose} \\boxed{{987654321}}").verdict == "wrong"


@quick_examples
@given(gold=GOLDS, prose=PROSE)
def test_prose_without_a_mark_is_never_paid(gold: str, prose: str) -> None:
    assert judge_math(gold, f"{prose} the answer is {gold}.").verdict == "unparsed"


@quick_examples
@given(number=st.integers(-(10**15), 10**15), mark=st.sampled_from([",", r"\,", "{,}", r",\!", " "]))
def test_grouping_marks_inside_a_number_do_not_matter(number: int, mark: str) -> None:
    assert verdict(str(number), f"{number:,}".replace(",", mark)) == "correct"
    assert verdict(str(number + 1), f"{number:,}".replace(",", mark)) == "wrong"


@quick_examples
@given(
    top=st.integers(-999, 999),
    bottom=st.integers(1, 999),
    factor=st.integers(2, 9),
    style=st.sampled_from([r"\frac{%d}{%d}", r"\dfrac{%d}{%d}", "%d/%d"]),
)
def test_fractions_compare_by_value(top: int, bottom: int, factor: int, style: str) -> None:
    gold = rf"\frac{{{top}}}{{{bottom}}}"
    assert verdict(gold, style % (top * factor, bottom * factor)) == "correct"
    assert verdict(gold, style % (top * factor + 1, bottom * factor)) == "wrong"


@quick_examples
@given(members=st.lists(st.integers(-50, 50), min_size=2, max_size=5, unique=True), data=st.data())
def test_lists_compare_without_order_and_whole(members: list[int], data: st.DataObject) -> None:
    gold = ", ".join(map(str, members))
    shuffled = data.draw(st.permutations(members))
    assert verdict(gold, ", ".join(map(str, shuffled))) == "correct"
    assert verdict(gold, ", ".join(map(str, shuffled[1:]))) == "wrong"
    assert verdict(gold, ", ".join(map(str, [*shuffled, 99]))) == "wrong"


@quick_examples
@given(text=st.text(alphabet="\\{}()[]$#,;=<.+-/ _'\n12x", max_size=40))
def test_no_text_breaks_the_reader(text: str) -> None:
    assert isinstance(list(values(read(undress(text)))), list)
    assert judge_math("5", f"\\boxed{{{text}}}").verdict in ("correct", "wrong", "unparsed")
