"""What the model will read: prompts rendered, their lengths, and the tokens that end an answer.

Owns the comparison of template, tokenizer, generation settings and rewards. Needs a tokenizer, no model.
"""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from grpo_cli.errors import RecipeError
from grpo_cli.issues import Finding
from grpo_cli.rewards.contract import Batch
from grpo_cli.rewards.scoring import Reward

MOST_DROPPED = 0.1
"""Share of rows over `max_prompt_length` beyond which it is worth a warning."""
_OPENED = re.compile(r"<(think|thinking|thought|reasoning|scratchpad)>\s*$")
_MARK = "mark of an answer"
_THOUGHT = "a thought\n</{tag}>\n<answer>\nan answer\n</answer>"


@dataclass(frozen=True)
class PromptSample:
    """Prompts as the model will see them."""

    rendered: str
    """The first prompt with everything the chat template adds."""
    lengths: tuple[int, ...]
    """Tokens of each prompt looked at, in the order of the rows."""
    places: tuple[int, ...]
    """Where these stand among the rows of the training data, from 0."""
    total: int
    """Rows of the training data."""

    def as_json(self) -> dict[str, Any]:
        """The sample as plain values: lengths as percentiles (nearest rank)."""
        ordered = sorted(self.lengths)
        median, p95 = (ordered[math.ceil(share * len(ordered)) - 1] for share in (0.5, 0.95))
        return {
            "rendered": self.rendered,
            "counted": len(ordered),
            "rows": self.total,
            "tokens": {"min": ordered[0], "median": median, "p95": p95, "max": ordered[-1]},
        }

    def kept(self, longest_allowed: int | None) -> list[int]:
        """The lengths that `max_prompt_length` lets through."""
        return [n for n in self.lengths if longest_allowed is None or n <= longest_allowed]

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt looked at."""
        return max(self.lengths)


def render(tokenizer: Any, prompt: Any, kwargs: dict[str, Any] | None) -> str:
    """A prompt as text, with everything the chat template adds."""
    if isinstance(prompt, str):
        return prompt
    from grpo_cli.fast.completions import apply_template

    options = {"add_generation_prompt": True, **(kwargs or {})}
    return str(apply_template(tokenizer, prompt, tokenize=False, **options))


def check_differ(rendered: Sequence[str]) -> Iterator[Finding]:
    """Check that prompts differ: a template may name no column, or a chat template leave out the content."""
    if len(rendered) > 1 and len(set(rendered)) == 1:
        yield Finding(
            "prompt: all the same",
            "warning",
            f"the {len(rendered)} prompts looked at are the same text",
            "name a column in `dataset.prompt.user`, such as {{ question }}; or correct the chat template, if it "
            "leaves out what messages say",
            "the model never sees what the rows ask",
            "dataset.prompt",
        )


def check_lengths(
    sample: PromptSample,
    *,
    longest_allowed: int | None,
    completion: int,
    context: int | None,
    vllm_length: int | None,
) -> Iterator[Finding]:
    """Prompts that are dropped for their length, or too long to be answered.

    Args:
        sample: The prompts.
        longest_allowed: `dataset.max_prompt_length`.
        completion: `generation.max_completion_length`.
        context: Positions the model was made for.
        vllm_length: vLLM's `max_model_length`, where vLLM samples.
    """
    kept = sample.kept(longest_allowed)
    dropped = len(sample.lengths) - len(kept)
    if dropped > MOST_DROPPED * len(sample.lengths):
        room = min((n - completion for n in (context, vllm_length) if n), default=sample.longest)
        yield Finding(
            "prompt: dropped rows",
            "warning" if kept else "error",
            f"{dropped} of {len(sample.lengths)} prompts have more than {longest_allowed} tokens "
            f"(longest: {sample.longest})",
            f"set `max_prompt_length: {max(min(sample.longest, room), 1)}`",
            "these rows are dropped, and the longest questions are rarely the least useful",
            "dataset.max_prompt_length",
        )
    for limit, who, path in (
        (context, "the model's context", "generation.max_completion_length"),
        (vllm_length, "vLLM's max_model_length", "generation.vllm.max_model_length"),
    ):
        yield from _check_room(kept, limit, who, path, completion)


def _check_room(
    lengths: Sequence[int], limit: int | None, who: str, path: str, completion: int
) -> Iterator[Finding]:
    if limit is None or not lengths:
        return
    over = sum(length + completion > limit for length in lengths)
    if not over:
        return
    longest = max(lengths)
    if "vllm" in path:
        fix = f"set `generation.vllm.max_model_length: {longest + completion}`"
    elif min(lengths) >= limit:
        path = "model.path"
        fix = f"shorten the prompts, or name a model that reads {longest + completion} tokens"
    else:
        room = limit - longest
        edits = [f"`max_completion_length: {room}`"] if room > 0 else []
        if limit - completion >= min(lengths):
            edits.append(f"`dataset.max_prompt_length: {limit - completion}`")
        fix = "set " + (" or ".join(edits) or f"`max_completion_length` well below {limit}")
    yield Finding(
        f"length: {who}",
        "error",
        f"{over} of {len(lengths)} prompts do not fit: up to {longest} tokens and "
        f"{completion} to write, {who} is {limit}",
        fix,
        "beyond it the model writes noise or breaks off with an index error",
        path,
    )


def check_stop_tokens(
    tokenizer: Any, declared: Sequence[int], prompts: Sequence[Any], kwargs: dict[str, Any] | None
) -> Iterator[Finding]:
    """Whether tokenizer, generation settings and chat template agree on what ends an answer.

    Args:
        tokenizer: With its eos token.
        declared: End-of-sequence tokens of the model's generation settings.
        prompts: Prompts of the dataset; messages where the chat template is used.
        kwargs: The recipe's `chat_template_kwargs`.
    """
    stops = {tokenizer.eos_token_id, *declared}
    name = tokenizer.convert_ids_to_tokens
    if declared and tokenizer.eos_token_id not in declared:
        yield Finding(
            "stop token: tokenizer and model",
            "warning",
            f"the tokenizer ends with {tokenizer.eos_token!r}, the model's generation settings with "
            f"{', '.join(repr(name(token)) for token in declared)}",
            "give tokenizer_config.json and generation_config.json the same `eos_token`",
            "the trainer writes the tokenizer's into the model, and what is served later may stop elsewhere",
            "model.path",
        )
    if not prompts or isinstance(prompts[0], str):
        return
    end = _end_of_turn(tokenizer, prompts[0], kwargs)
    if end is not None and end not in stops:
        yield Finding(
            "stop token: chat template",
            "warning",
            f"the chat template ends a turn with {name(end)!r}, and sampling stops at "
            f"{', '.join(sorted(repr(name(token)) for token in stops))}",
            f"set `eos_token` to {name(end)!r} in tokenizer_config.json, or give `model.chat_template` "
            "one that ends turns with the model's own token",
            "a model that learned this template never stops, and every completion is cut off",
            "model.chat_template",
        )


def _end_of_turn(tokenizer: Any, prompt: Any, kwargs: dict[str, Any] | None) -> int | None:
    """The special token that the chat template writes right after an assistant's message."""
    from grpo_cli.fast.completions import apply_template

    turn = [*prompt, {"role": "assistant", "content": _MARK}]
    try:
        text = apply_template(tokenizer, turn, tokenize=False, **(kwargs or {}))
    except RecipeError:
        # Training never shows it an answer.
        return None
    _, found, rest = text.rpartition(_MARK)
    if not found:
        return None
    special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    ids = tokenizer(rest, add_special_tokens=False)["input_ids"]
    return next((token for token in ids if token in special), None)


def check_padding(tokenizer: Any, own_pad: bool) -> Iterator[Finding]:
    """A tokenizer without a padding token of its own."""
    if not own_pad:
        yield Finding(
            "tokenizer: padding",
            "note",
            f"the tokenizer has no padding token; {tokenizer.pad_token!r} takes its place",
            "add `pad_token` to tokenizer_config.json if another one is meant",
            "GRPO masks what follows the first end of sequence, so training is right all the same",
            "model.path",
        )


def check_opening(
    rendered: str, rewards: Sequence[Reward], row: Batch, encode: Callable[[str], list[int]]
) -> Iterator[Finding]:
    """A prompt that ends in an opened tag, and rewards that want the model to write that tag.

    Args:
        rendered: A prompt as the model sees it.
        rewards: The recipe's; dear ones are not asked.
        row: A batch of one row, whose completions are replaced.
        encode: Gives a text's token ids.
    """
    opened = _OPENED.search(rendered)
    if opened is None:
        return
    tag = opened.group(1)
    inside = _THOUGHT.format(tag=tag)
    for index, reward in enumerate(rewards):
        if reward.params.costly:
            continue
        texts = (inside, f"<{tag}>\n{inside}")
        without, written = (_score(reward, row, text, encode(text)) for text in texts)
        if without is not None and written is not None and written > without:
            yield Finding(
                "template: opened tag",
                "error",
                f"the prompt ends with `<{tag}>`, so completions start inside it; `{reward.name}` gives "
                f"{without:g} to that, and {written:g} only where the completion opens it again",
                f"use a `model.chat_template` that does not end in `<{tag}>`, or a `regex` reward with "
                f"`pattern: '</{tag}>'` in its place",
                "the reward is nearly always the same, whatever the model learns",
                f"rewards.{index}",
            )


def _score(reward: Reward, row: Batch, text: str, tokens: list[int]) -> float | None:
    chat = not isinstance(row.prompts[0], str)
    answer = [{"role": "assistant", "content": text}] if chat else text
    return reward.score(replace(row, completions=[answer], completion_ids=[tokens]))[0].value
