"""Special tokens of a task, which rewards do not see unless `generation.skip_special_tokens` is false."""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from grpo_cli.fast.completions import Completion
from grpo_cli.fast.tokens import CompletionReader, all_eos_token_ids
from grpo_cli.issues import Issue
from grpo_cli.models.loading import load_generation_config
from grpo_cli.recipe.recipe import Recipe

_OFTEN = 0.1
"""Share of completions with a special token from which on it is likely to be meant."""
_FIX = "set `generation.skip_special_tokens: false`"


def check_named(recipe: Recipe, tokenizer: Any) -> Iterator[Issue]:
    """Find rewards whose settings name a special token."""
    reader = _reader(recipe, tokenizer)
    special = reader.find_hidden(tokenizer.added_tokens_decoder)
    for index, reward in enumerate(recipe.rewards):
        # A pattern may escape some of its characters.
        settings = json.dumps(reward.model_dump(mode="json"), ensure_ascii=False).replace("\\", "")
        names = [tokenizer.decode([token]) for token in sorted(special)]
        if named := [name for name in names if name in settings]:
            seen = f"names the special token {', '.join(named)}, which texts of completions lack"
            why = "the reward would never see it"
            yield Issue(seen, _FIX, f"rewards.{index}", level="warning", subject="rewards", why=why)


def check_sampled(
    recipe: Recipe, tokenizer: Any, groups: Sequence[Sequence[Completion]]
) -> Iterator[Issue]:
    """Find special tokens that completions hold and their texts lack."""
    reader = _reader(recipe, tokenizer)
    sampled = [completion.token_ids for group in groups for completion in group]
    counts = Counter(token for ids in sampled for token in reader.find_hidden(ids))
    counts.pop(tokenizer.bos_token_id, None)
    if not counts:
        return
    template = str(tokenizer.chat_template or "")
    parts = []
    is_meant = False
    for token, count in counts.most_common():
        name = tokenizer.decode([token])
        parts.append(f"{name} in {count}")
        is_meant |= count >= _OFTEN * len(sampled) and name not in template
    seen = f"of {len(sampled)} completions, texts lack the special tokens that they hold: {', '.join(parts)}"
    yield Issue(
        seen,
        f"{_FIX} if they are part of the task",
        level="warning" if is_meant else "note",
        subject="completions",
        why="rewards, logs and evaluations do not see them",
    )


def _reader(recipe: Recipe, tokenizer: Any) -> CompletionReader:
    ends = all_eos_token_ids(load_generation_config(recipe.model), tokenizer)
    skips = recipe.generation.skip_special_tokens
    return CompletionReader(tokenizer, frozenset(ends), skip_special_tokens=skips)
