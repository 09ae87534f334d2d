"""What the benchmark reckons with: lengths, counts, medians and tables. Nothing here measures."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from scripts.bench import flops  # noqa: E402
from scripts.bench.live import LiveTensors  # noqa: E402
from scripts.bench.measure import ChildFailed, Command, python  # noqa: E402
from scripts.bench.report import Row, at_least, at_most, exponent, number, ratio, table  # noqa: E402
from scripts.bench.runs import read_updates  # noqa: E402
from scripts.bench.shapes import SHORT, SMOLLM2, TINY, Model, Shape, tokenizer, write_prompts  # noqa: E402
from scripts.bench.trl_run import reward  # noqa: E402
from scripts.bench.work import config, minibatch, prompts  # noqa: E402

SMALL = Model(name="small", hidden=8, layers=2, heads=4, kv_heads=2, intermediate=12, vocab=32)
ONE = Shape(
    name="one", model=SMALL, groups=2, group_size=3, prompt=4, response=5, micro_batch_tokens=64, logit_chunk=16
)


# --- shapes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("model", "expected"), [(TINY, 3_180_800), (SMOLLM2, 134_515_008)])
def test_models_have_the_parameters_they_are_named_for(model: Model, expected: int) -> None:
    with torch.device("meta"):
        from transformers import LlamaForCausalLM

        made = LlamaForCausalLM(model.config())
    assert sum(parameter.numel() for parameter in made.parameters()) == expected
    assert flops.parameters(model) == expected


def test_a_prompt_has_its_exact_length_as_text_and_as_tokens(tmp_path: Path) -> None:
    read = tokenizer(SMALL.vocab)
    write_prompts(ONE, tmp_path / "prompts.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "prompts.jsonl").read_text().splitlines()]
    assert {len(read(row["question"])["input_ids"]) for row in rows} == {4}
    assert {len(prompt.token_ids) for prompt in prompts(ONE)} == {4}
    assert len(prompts(ONE)) == 2


def test_no_token_that_the_model_emits_ends_a_response() -> None:
    read = tokenizer(SMALL.vocab)
    assert read.eos_token_id == SMALL.vocab
    assert read.decode(range(SMALL.vocab)) == " ".join(rf"\boxed{{{index}}}" for index in range(SMALL.vocab))


def test_both_sides_find_the_same_answers_right(tmp_path: Path) -> None:
    """Numbers up to half the vocabulary: 0 to 16 of 32, by the verifier of a run and by the reward given to TRL."""
    from grpo_lab.rewards import Verifier
    from grpo_lab.types import Problem

    write_prompts(ONE, tmp_path / "prompts.jsonl")
    row = json.loads((tmp_path / "prompts.jsonl").read_text().splitlines()[0])
    problem = Problem(id="one", question="", gold=row["answer"], tolerance=row["tolerance"])
    texts = [rf"\boxed{{3}} \boxed{{30}} \boxed{{{index}}}" for index in range(32)]
    with Verifier("math", workers=1, timeout=5.0) as verifier:
        ours = [float(judgement.verdict == "correct") for judgement in verifier.judge([(problem, t) for t in texts])]
    assert ours == [1.0] * 17 + [0.0] * 15
    assert reward(32)(texts, prompts=None) == ours


def test_a_minibatch_is_mixed_and_has_exact_lengths() -> None:
    batch = minibatch(ONE)
    assert batch.counts.tokens == ONE.tokens == 30
    assert batch.counts.responses == ONE.responses == 6
    assert [group.rewards for group in batch.groups] == [(0.0, 1.0, 0.0)] * 2
    assert all(group.is_mixed for group in batch.groups)


def test_runs_of_the_wrong_length_are_refused(tmp_path: Path) -> None:
    seconds = {"collect": 1.0, "sync": 0.5, "learn": 2.0, "other": 0.25}
    row = {"update": 1, "response/length": 5.0, "time": {**seconds, "evaluate": 0.0, "elapsed": 9.0}}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    assert read_updates(tmp_path / "metrics.jsonl", ONE) == (seconds,)
    with pytest.raises(ValueError, match=r"update 1 had responses of 5.0 tokens"):
        read_updates(tmp_path / "metrics.jsonl", replace(ONE, response=6))


def test_the_configuration_is_the_embedded_default_on_policy() -> None:
    whole = config("schedule.v=1")
    assert (whole.learner.engine, whole.rollout.engine, whole.learner.precision) == ("torch_local", "hf", "fp32")
    assert whole.learner.activation_checkpointing is False


# --- counting ---------------------------------------------------------------------------------------------------


def test_useful_work_by_hand() -> None:
    """Head size 2: a layer has query and output 64 each, key and value 32 each, three of 96, 480 in all; two layers.
    A group has 4 + 3 * 4 positions. Pairs: the prompt 1 + 2 + 3 + 4, a response 5 + 6 + 7 + 8."""
    assert flops.matrices(SMALL) == 960
    assert flops.head(SMALL) == 256
    assert flops.positions(ONE) == 32
    assert flops.pairs(ONE) == 2 * (10 + 3 * 26)
    assert flops.update_flops(ONE) == 6 * 960 * 32 + 6 * 256 * 30 + 12 * 2 * 8 * 176


def test_a_prompt_counts_once_for_its_group() -> None:
    alone = replace(SHORT, group_size=1)
    together = replace(SHORT, group_size=2)
    assert flops.positions(together) - flops.positions(alone) == 32 * 23
    assert flops.positions(SHORT) == 32 * (8 + 8 * 23)


def test_tensors_are_counted_while_they_live() -> None:
    """[3, 10] in float32 has 120 bytes: two at once, a view for nothing, and none of the matrix or of other widths."""
    weight = torch.ones(10, 4)
    with LiveTensors(before=[weight], width=10) as wide:
        first = torch.ones(3, 4) @ weight.T
        assert wide.peak == 120
        second = first + 1
        second.view(1, 3, 10)
        assert wide.peak == 240
        del first
        third = second * 2
        assert wide.peak == 240
        torch.ones(50, 50)
    assert third.shape == (3, 10)
    assert wide.peak == 240


def test_what_autograd_saves_is_counted() -> None:
    """exp keeps its result for the backward pass; the sum after it is 4 bytes, the gradients come later."""
    leaf = torch.zeros(100, requires_grad=True)
    with LiveTensors(before=[leaf]) as live:
        total = leaf.exp().sum()
        assert live.peak == 404
        extra = torch.ones(50)
        assert live.peak == 604
        del extra
        total.backward()
    assert leaf.grad is not None


# --- what is made of the numbers --------------------------------------------------------------------------------


def test_a_ratio_is_of_medians_and_its_range_of_all_pairs() -> None:
    middle, least, largest = ratio([4.0, 6.0, 20.0], [2.0, 1.0, 3.0])
    assert (middle, least, largest) == (3.0, pytest.approx(4 / 3), 20.0)


def test_an_exponent_is_the_slope_of_the_logarithms() -> None:
    assert exponent([1, 2, 4, 8], [3, 6, 12, 24]) == pytest.approx(1)
    assert exponent([1, 2, 4], [5, 20, 80]) == pytest.approx(2)
    # Through (0, 0), (1, 0), (2, 1) in powers of two: slope (-1*-1/3 + 0 + 1*2/3) / 2.
    assert exponent([1, 2, 4], [1, 1, 2]) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("value", "expected"),
    [(0, "0"), (1.5, "1.5"), (0.01234, "0.0123"), (12.345, "12.3"), (123456.7, "123,457"), (300, "300"), (2.0, "2")],
)
def test_numbers_have_three_digits(value: float, expected: str) -> None:
    assert number(value) == expected


def test_a_table_says_what_is_met() -> None:
    rows = [
        Row("speed", 1.4, "x", at_least(1.5), {"ours": 2.0}),
        Row("memory", 0.6, "", at_most(0.6), {"theirs": "7 MiB"}),
        Row("seconds", 2.5, "s"),
    ]
    assert table(rows).splitlines() == [
        "| what | measured | target | met | ours | theirs |",
        "| --- | --- | --- | --- | --- | --- |",
        "| speed | 1.4 x | ≥ 1.5 | NO | 2 |  |",
        "| memory | 0.6 | ≤ 0.6 | yes |  | 7 MiB |",
        "| seconds | 2.5 s |  |  |  |  |",
    ]
    assert rows[0].plain() == {
        "what": "speed",
        "measured": 1.4,
        "unit": "x",
        "target": "≥ 1.5",
        "met": False,
        "ours": 2.0,
    }
    assert rows[2].plain() == {"what": "seconds", "measured": 2.5, "unit": "s"}


# --- commands ---------------------------------------------------------------------------------------------------


def test_a_command_answers_in_turn_and_tells_its_peak(tmp_path: Path) -> None:
    """Output that is no answer is passed over; 64 MiB that were held and freed count."""
    program = (
        "import sys\nheld = bytearray(b'x' * 2**26)\ndel held\n"
        "for k, _ in enumerate(sys.stdin):\n    print('noise', flush=True)\n    print(f'mark {k}', flush=True)"
    )
    command = Command(python("-c", program), log=tmp_path / "log", changes={})
    assert command.ask("mark ") == "0\n"
    assert command.ask("mark ") == "1\n"
    assert 2**26 < command.finish() < 2**33


def test_a_command_that_fails_says_what_it_said(tmp_path: Path) -> None:
    command = Command(python("-c", "import sys; sys.exit('no such thing')"), log=tmp_path / "log", changes={})
    with pytest.raises(ChildFailed, match="exit code 1:\nno such thing"):
        command.ask("mark ")
    command = Command(python("-c", "pass"), log=tmp_path / "log", changes={})
    with pytest.raises(ChildFailed, match="before its time"):
        command.ask("mark ")


def test_parts_that_do_not_exist_are_refused(tmp_path: Path) -> None:
    command = Command(python("-m", "scripts.bench", "leaner", f"--out={tmp_path}"), log=tmp_path / "log", changes={})
    with pytest.raises(ChildFailed, match="no part is called leaner"):
        command.finish()
