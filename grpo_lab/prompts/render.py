"""Problems to prompts: the template, the model's chat template, and the token ids of exactly that text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from grpo_lab.config import ConfigError, DatasetConfig
from grpo_lab.types import Problem, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PLACE = "{question}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendered:
    """The prompts that fit, in the order of their problems, and the number of those that did not."""

    prompts: list[Prompt]
    dropped: int


def user_content(config: DatasetConfig, question: str) -> str:
    r"""`dataset.template` with the question in it. Braces elsewhere stay: \boxed{} is text.

    Raises:
        ConfigError: the template has no {question}.
    """
    if _PLACE not in config.template:
        raise ConfigError(f"dataset.template={config.template!r} has no {_PLACE}: every prompt would be the same")
    return config.template.replace(_PLACE, question)


def render(
    problems: Sequence[Problem],
    config: DatasetConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_prompt_tokens: int,
) -> Rendered:
    """Fill in the template, apply the chat template, tokenise, and drop what is over `max_prompt_tokens`.

    The chat template is used where `config.chat` is true and the tokenizer has one; it writes its own special tokens,
    so its text is tokenised without adding any. Plain text gets those the tokenizer adds, except an end token.

    Raises:
        ConfigError: no prompt fits, or the chat template refuses the messages.
    """
    if not problems:
        return Rendered(prompts=[], dropped=0)
    contents = [user_content(config, problem.question) for problem in problems]
    if config.chat and tokenizer.chat_template:
        texts = [_chat_text(content, config, tokenizer) for content in contents]
        ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
    else:
        lead = f"{config.system_prompt}\n\n" if config.system_prompt else ""
        texts = [lead + content for content in contents]
        ids = [_plain_ids(row, text, tokenizer) for row, text in zip(tokenizer(texts)["input_ids"], texts, strict=True)]
    prompts = [
        Prompt(problem=problem, text=text, token_ids=tuple(row))
        for problem, text, row in zip(problems, texts, ids, strict=True)
    ]
    if empty := [prompt for prompt in prompts if not prompt.token_ids]:
        raise ConfigError(
            f"the prompt of problem {empty[0].id} has no tokens: check dataset.template and the tokenizer"
        )
    fitting = [prompt for prompt in prompts if len(prompt.token_ids) <= max_prompt_tokens]
    if not fitting:
        shortest = min(len(prompt.token_ids) for prompt in prompts)
        raise ConfigError(
            f"rollout.max_prompt_tokens={max_prompt_tokens} drops all {len(prompts)} prompts: the shortest has "
            f"{shortest} tokens; raise it"
        )
    return Rendered(prompts=fitting, dropped=len(prompts) - len(fitting))


def _chat_text(content: str, config: DatasetConfig, tokenizer: PreTrainedTokenizerBase) -> str:
    from jinja2 import TemplateError

    messages: list[dict[str, Any]] = [{"role": "user", "content": content}]
    if config.system_prompt:
        messages.insert(0, {"role": "system", "content": config.system_prompt})
    try:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, return_dict=False)
    except TemplateError as error:
        raise ConfigError(
            f"the model's chat template refuses the messages ({error}): try dataset.system_prompt=null or "
            "dataset.chat=false"
        ) from error
    assert isinstance(text, str)
    return text


def _plain_ids(ids: list[int], text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The ids without an end token that the tokenizer appended, and with one begin token where it and the text each
    wrote one."""
    begin, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    if end is not None and ids[-1:] == [end] and not text.endswith(tokenizer.eos_token):
        ids = ids[:-1]
    if begin is not None and ids[:2] == [begin, begin] and text.startswith(tokenizer.bos_token):
        ids = ids[1:]
    return ids
