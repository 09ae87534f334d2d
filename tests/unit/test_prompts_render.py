r"""Prompts: the template, the chat template, ids of exactly that text with one begin token, and the length limit."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from grpo_lab.config import ConfigError, DatasetConfig
from grpo_lab.prompts import render
from grpo_lab.types import Problem

CHARACTERS = [chr(code) for code in range(32, 127)] + ["\n"]
BEGIN, END, UNKNOWN = len(CHARACTERS), len(CHARACTERS) + 1, len(CHARACTERS) + 2

CHAT = (
    "<s>{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + CHAT


def tokenizer(*, chat: str | None = None, begin: bool = False, end: bool = False) -> PreTrainedTokenizerFast:
    """A token a character; `begin` and `end` say what it puts around a plain text."""
    core = Tokenizer(
        models.WordLevel(
            {token: index for index, token in enumerate([*CHARACTERS, "<s>", "</s>", "<unk>"])}, unk_token="<unk>"
        )
    )
    core.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    core.post_processor = processors.TemplateProcessing(
        single=("<s> " if begin else "") + "$A" + (" </s>" if end else ""),
        special_tokens=[("<s>", BEGIN), ("</s>", END)],
    )
    made = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    made.chat_template = chat
    return made


def problem(question: str) -> Problem:
    return Problem(id=question, question=question, gold="1")


def config(**changes: Any) -> DatasetConfig:
    return dataclasses.replace(DatasetConfig(kind="table", name="t", template="{question}="), **changes)


def characters(text: str) -> tuple[int, ...]:
    return tuple(CHARACTERS.index(character) for character in text)


def test_plain_text() -> None:
    (prompt,) = render([problem("1+2")], config(), tokenizer(), max_prompt_tokens=10).prompts
    assert (prompt.text, prompt.token_ids) == ("1+2=", characters("1+2="))
    assert prompt.id == "1+2"


def test_braces_survive_the_template() -> None:
    r"""\boxed{} in the template, and braces or even {question} in the question, are text."""
    template = "{question} Put it in \\boxed{}."
    (prompt,) = render(
        [problem("{x} {question}")], config(template=template), tokenizer(), max_prompt_tokens=99
    ).prompts
    assert prompt.text == "{x} {question} Put it in \\boxed{}."


def test_the_system_prompt_comes_first_in_plain_text() -> None:
    (prompt,) = render([problem("1")], config(system_prompt="Be brief."), tokenizer(), max_prompt_tokens=99).prompts
    assert prompt.text == "Be brief.\n\n1="


@pytest.mark.parametrize("begin", [False, True])
def test_a_chat_prompt_begins_once_whatever_the_tokenizer_adds(begin: bool) -> None:
    model = tokenizer(chat=CHAT, begin=begin, end=True)
    (prompt,) = render([problem("1+2")], config(), model, max_prompt_tokens=99).prompts
    assert prompt.text == "<s>[user]1+2=[assistant]"
    assert prompt.token_ids == (BEGIN, *characters("[user]1+2=[assistant]"))
    whole = model.apply_chat_template(
        [{"role": "user", "content": "1+2="}], add_generation_prompt=True, tokenize=True, return_dict=False
    )
    assert list(prompt.token_ids) == whole


def test_the_system_message_is_there_only_if_set() -> None:
    (prompt,) = render(
        [problem("1")], config(system_prompt="Be brief."), tokenizer(chat=CHAT), max_prompt_tokens=99
    ).prompts
    assert prompt.text == "<s>[system]Be brief.[user]1=[assistant]"


def test_chat_false_ignores_the_chat_template() -> None:
    (prompt,) = render([problem("1")], config(chat=False), tokenizer(chat=CHAT), max_prompt_tokens=99).prompts
    assert prompt.text == "1="


def test_plain_text_gets_one_begin_token_and_no_end_token() -> None:
    model = tokenizer(begin=True, end=True)
    (prompt,) = render([problem("1")], config(), model, max_prompt_tokens=99).prompts
    assert prompt.token_ids == (BEGIN, *characters("1="))
    # A template that writes the begin token itself does not make two of it.
    (prompt,) = render([problem("1")], config(template="<s>{question}="), model, max_prompt_tokens=99).prompts
    assert prompt.token_ids == (BEGIN, *characters("1="))


def test_an_end_token_that_the_text_writes_itself_stays() -> None:
    (prompt,) = render([problem("1")], config(template="{question}</s>"), tokenizer(), max_prompt_tokens=99).prompts
    assert prompt.token_ids == (*characters("1"), END)


def test_prompts_over_the_limit_are_dropped_and_counted() -> None:
    problems = [problem("1" * length) for length in (19, 63, 64, 399)]
    rendered = render(problems, config(), tokenizer(), max_prompt_tokens=64)
    assert [len(prompt.token_ids) for prompt in rendered.prompts] == [20, 64]
    assert rendered.dropped == 2


def test_dropping_all_names_the_key_and_the_shortest() -> None:
    with pytest.raises(ConfigError, match=r"rollout\.max_prompt_tokens=3 drops all 2 prompts: the shortest has 4"):
        render([problem("111"), problem("1111")], config(), tokenizer(), max_prompt_tokens=3)


def test_no_problems_are_no_prompts() -> None:
    assert render([], config(), tokenizer(), max_prompt_tokens=3).prompts == []


def test_a_prompt_without_tokens_is_refused() -> None:
    with pytest.raises(ConfigError, match="has no tokens"):
        render([problem("")], config(template="{question}"), tokenizer(), max_prompt_tokens=3)


def test_a_template_that_refuses_the_system_message_is_explained() -> None:
    with pytest.raises(ConfigError, match=r"refuses the messages \(no system role\): try dataset\.system_prompt=null"):
        render([problem("1")], config(system_prompt="S"), tokenizer(chat=NO_SYSTEM), max_prompt_tokens=99)
