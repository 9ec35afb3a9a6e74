"""What the model will read: prompts rendered, their lengths, the tokens that end an answer, and the tags that
rewards expect in it. Needs a tokenizer, no model.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from grpo_cli.errors import RecipeError
from grpo_cli.issues import Issue, Level
from grpo_cli.rewards.contract import Batch
from grpo_cli.rewards.scoring import Reward

_MOST_DROPPED = 0.1
"""Share of rows over `max_prompt_length` beyond which it is worth a warning."""
_OPENED = re.compile(r"<(\w+)>\s*$")
_MARK = "mark of an answer"


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
        """Return the sample as plain values: lengths as percentiles (nearest rank)."""
        ordered = sorted(self.lengths)
        median, p95 = (ordered[math.ceil(share * len(ordered)) - 1] for share in (0.5, 0.95))
        return {
            "rendered": self.rendered,
            "counted": len(ordered),
            "rows": self.total,
            "tokens": {"min": ordered[0], "median": median, "p95": p95, "max": ordered[-1]},
        }

    def kept(self, longest_allowed: int | None) -> list[int]:
        """Return the lengths that `max_prompt_length` lets through."""
        return [n for n in self.lengths if longest_allowed is None or n <= longest_allowed]

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt looked at."""
        return max(self.lengths)


def render(tokenizer: Any, prompt: Any, kwargs: dict[str, Any] | None) -> str:
    """Return a prompt as text, with everything the chat template adds."""
    if isinstance(prompt, str):
        return prompt
    from grpo_cli.fast.tokens import apply_template

    options = {"add_generation_prompt": True, **(kwargs or {})}
    return str(apply_template(tokenizer, prompt, tokenize=False, **options))


def check_differ(rendered: Sequence[str]) -> Iterator[Issue]:
    """Check that prompts differ: a template may name no column, or a chat template leave out the content."""
    if len(rendered) > 1 and len(set(rendered)) == 1:
        seen, subject = (
            f"the {len(rendered)} prompts looked at are the same text",
            "prompt: all the same",
        )
        fix = (
            "name a column in `dataset.prompt.user`, such as {{ question }}; or correct the chat template, if it "
            "leaves out what messages say"
        )
        why = "the model never sees what the rows ask"
        yield Issue(seen, fix, "dataset.prompt", level="warning", subject=subject, why=why)


VLLM_LENGTH = "generation.vllm.max_model_length"
_OWNERS = {
    "model.path": "the model's context",
    "teacher.path": "the teacher's context",
    VLLM_LENGTH: "vLLM's max_model_length",
}


def check_lengths(
    sample: PromptSample,
    *,
    longest_allowed: int | None,
    completion: int,
    limits: Mapping[str, int | None],
) -> Iterator[Issue]:
    """Find prompts that are dropped for their length, or too long to be answered.

    `limits` has, by the path of what reads prompt and completion together, the positions it was made for.
    """
    kept, count, longest = sample.kept(longest_allowed), len(sample.lengths), sample.longest
    dropped = count - len(kept)
    if dropped:
        level: Level = "warning" if dropped > _MOST_DROPPED * count else "note"
        room = min((n - completion for n in limits.values() if n), default=longest)
        yield Issue(
            f"{dropped} of {count} prompts have more than {longest_allowed} tokens (longest: {longest})",
            f"set `max_prompt_length: {max(min(longest, room), 1)}`",
            "dataset.max_prompt_length",
            level=level if kept else "error",
            subject="prompt: dropped rows",
            why="these rows are dropped, and the longest questions are rarely the least useful",
        )
    for owner, limit in limits.items():
        over = [length for length in kept if limit and length + completion > limit]
        if limit and over:
            path, fix = _fit(kept, limit, completion, owner)
            yield Issue(
                f"{len(over)} of {len(kept)} prompts do not fit: up to {max(kept)} tokens and {completion} to "
                f"write, {_OWNERS[owner]} is {limit}",
                fix,
                path,
                subject=f"length: {_OWNERS[owner]}",
                why="beyond it the model writes noise or breaks off with an index error",
            )


def _fit(kept: Sequence[int], limit: int, completion: int, owner: str) -> tuple[str, str]:
    """Return the key to change so that prompts and completions fit, and the edit."""
    longest = max(kept)
    needed, room = longest + completion, limit - longest
    if owner == VLLM_LENGTH:
        return owner, f"set `{owner}: {needed}`"
    if min(kept) >= limit:
        return owner, f"shorten the prompts, or name a model that reads {needed} tokens"
    edits = [f"`max_completion_length: {room}`"] if room > 0 else []
    if limit - completion >= min(kept):
        edits.append(f"`dataset.max_prompt_length: {limit - completion}`")
    fix = "set " + (" or ".join(edits) or f"`max_completion_length` well below {limit}")
    return "generation.max_completion_length", fix


def check_stop_tokens(
    tokenizer: Any, declared: Sequence[int], prompts: Sequence[Any], kwargs: dict[str, Any] | None
) -> Iterator[Issue]:
    """Check that tokenizer, generation settings (`declared`) and chat template agree on what ends an answer."""
    name = tokenizer.convert_ids_to_tokens
    if declared and tokenizer.eos_token_id not in declared:
        ends = ", ".join(repr(name(token)) for token in declared)
        yield Issue(
            f"the tokenizer ends with {tokenizer.eos_token!r}, the model's generation settings with {ends}",
            "give tokenizer_config.json and generation_config.json the same `eos_token`",
            "model.path",
            level="warning",
            subject="stop token: tokenizer and model",
            why="the trainer writes the tokenizer's into the model, and what is served later may stop elsewhere",
        )
    if not prompts or isinstance(prompts[0], str):
        return
    stops, end = {tokenizer.eos_token_id, *declared}, _end_of_turn(tokenizer, prompts[0], kwargs)
    if end is not None and end not in stops:
        ends = ", ".join(sorted(repr(name(token)) for token in stops))
        yield Issue(
            f"the chat template ends a turn with {name(end)!r}, and sampling stops at {ends}",
            f"set `eos_token` to {name(end)!r} in tokenizer_config.json, or give `model.chat_template` one that "
            "ends turns with the model's own token",
            "model.chat_template",
            level="warning",
            subject="stop token: chat template",
            why="a model that learned this template never stops, and every completion is cut off",
        )


def _answer_to(prompt: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a message of the assistant, in parts if those of the prompt are."""
    in_parts = isinstance(prompt[-1]["content"], list)
    return {
        "role": "assistant",
        "content": [{"type": "text", "text": _MARK}] if in_parts else _MARK,
    }


def _fill(tokenizer: Any, messages: Any, kwargs: dict[str, Any] | None, **more: Any) -> str | None:
    """Return messages as the chat template writes them; None if it refuses them, as training never shows them."""
    from grpo_cli.fast.tokens import apply_template

    try:
        return str(
            apply_template(tokenizer, messages, tokenize=False, **{**(kwargs or {}), **more})
        )
    except RecipeError:
        return None


def check_template(
    tokenizer: Any, prompt: Any, kwargs: dict[str, Any] | None, path: str
) -> Iterator[Issue]:
    """Find a chat template that leaves out the system message, or the beginning of the answer.

    Args:
        tokenizer: The tokenizer.
        prompt: A prompt, as text or messages.
        kwargs: The recipe's variables for the template.
        path: Where the recipe says what the system message is.
    """
    if isinstance(prompt, str):
        return
    rendered = _fill(tokenizer, prompt, kwargs, add_generation_prompt=True)
    # An episode may begin with its system message alone.
    rest = prompt[1:] if prompt[0]["role"] == "system" else []
    if rendered is None:
        return
    if rest and rendered == _fill(tokenizer, rest, kwargs, add_generation_prompt=True):
        yield Issue(
            "the chat template leaves out the system message: prompts with and without it are the same",
            "move its text into `dataset.prompt.user`, or set `model.chat_template` to one that shows it",
            path,
            level="warning",
            subject="template: system message",
            why="the model never sees what it says",
        )
    answered = _fill(tokenizer, [*prompt, _answer_to(prompt)], kwargs) or ""
    before = answered.rpartition(_MARK)[0]
    opening = before.removeprefix(rendered).strip() if before.startswith(rendered) else ""
    if opening and rendered == _fill(tokenizer, prompt, kwargs, add_generation_prompt=False):
        yield Issue(
            f"the prompt ends before {opening!r:.60}, with which the chat template begins an answer: it does not "
            "read `add_generation_prompt`",
            f"end it with {{% if add_generation_prompt %}}{opening}{{% endif %}}, or set "
            "`model.chat_template` to one that does",
            "model.chat_template",
            level="warning",
            subject="template: beginning of the answer",
            why="the model would have to write it itself, as it never learned to",
        )


def _end_of_turn(tokenizer: Any, prompt: Any, kwargs: dict[str, Any] | None) -> int | None:
    """Return the special token that the chat template writes right after an assistant's message."""
    text = _fill(tokenizer, [*prompt, _answer_to(prompt)], kwargs) or ""
    _, mark, rest = text.rpartition(_MARK)
    special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    ids = tokenizer(rest, add_special_tokens=False)["input_ids"] if mark else []
    return next((token for token in ids if token in special), None)


# --- what rewards of format expect -------------------------------------------------------------


def check_opening(
    rendered: str, rewards: Sequence[Reward], row: Batch, encode: Callable[[str], list[int]]
) -> Iterator[Issue]:
    """Find rewards that want the model to write a tag with which the prompt already ends.

    They are tried on `row`, a batch of one, with other completions.
    """
    opened = _OPENED.search(rendered)
    if opened is None:
        return
    tag = opened.group(1)
    inside = f"a thought\n</{tag}>"
    inside += "" if tag == "answer" else "\n<answer>\nan answer\n</answer>"
    for index, reward in enumerate(rewards):
        if reward.meta.costly or reward.meta.needs_episode:
            continue
        texts = (inside, f"<{tag}>\n{inside}")
        without, written = (_score(reward, row, text, encode(text)) for text in texts)
        pattern = getattr(reward.params, "pattern", "")
        if without is not None and written is not None and written > without:
            gives = (
                f"gives {without:g} to that, and {written:g} only if the completion opens it again"
            )
        elif f"<{tag}>" in pattern:
            gives = f"looks for `<{tag}>` in the completion"
        else:
            continue
        known = hasattr(reward.params, "prefilled")
        edit = "set `prefilled: true`" if known else f"take `<{tag}>` out of what it expects"
        yield Issue(
            f"the prompt ends with `<{tag}>`, so completions start inside it; `{reward.name}` {gives}",
            f"{edit}, or use a `model.chat_template` that does not end in `<{tag}>`",
            f"rewards.{index}",
            subject="template: opened tag",
            why="the reward is nearly always the same, whatever the model learns",
        )


def _score(reward: Reward, row: Batch, text: str, tokens: list[int]) -> float | None:
    chat = not isinstance(row.prompts[0], str)
    answer = [{"role": "assistant", "content": text}] if chat else text
    return reward.score(replace(row, completions=[answer], completion_ids=[tokens]))[0].value
