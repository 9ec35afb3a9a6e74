"""What became of the episodes that were sampled, and what is wrong with them."""

from collections.abc import Iterator, Mapping, Sequence

from grpo_cli.analysis.metrics import EPISODE_METRICS, Metric, per_prompt, summarize
from grpo_cli.analysis.samples import ScoredCompletion, group_by_row
from grpo_cli.issues import Issue
from grpo_cli.probing.signal import CLIPPED
from grpo_cli.recipe.episode import EpisodeConfig

_MOST_WRONG = 0.5
"""Share of calls that may be malformed, or may fail, before it is worth a warning."""


def read_episodes(scored: Sequence[ScoredCompletion]) -> dict[str, Metric]:
    """Return the metrics of episodes, by the names of `EPISODE_METRICS`."""
    groups = group_by_row(scored)
    values = per_prompt(groups, {})
    return summarize({name: values[name] for name in EPISODE_METRICS}, len(groups[0]), seed=0)


def judge_episodes(episodes: Mapping[str, Metric], config: EpisodeConfig) -> Iterator[Issue]:
    """Find episodes that break off, and calls that are not made, cannot be read, or fail."""
    value = {name: metric.value or 0.0 for name, metric in episodes.items()}
    cut = value["cut_off_turns"]
    if cut >= CLIPPED:
        yield Issue(
            f"{cut:.0%} of episodes end with an answer that is cut off at {config.max_turn_tokens} tokens",
            "raise `episode.max_turn_tokens`, or see that the model ends its answers (stop tokens)",
            "episode.max_turn_tokens",
            level="warning",
            subject="episodes: cut off",
            why="an answer without its end is not acted on, and the episode ends with it",
        )
    elif not value["calls"] and value["cut_off_episodes"] < CLIPPED:
        yield Issue(
            "no episode has a call",
            "say in the prompt when to use which tool, or take a model that was trained to call tools",
            "dataset.prompt",
            level="warning",
            subject="episodes: tools unused",
            why="what is never sampled is never learned",
        )
    if value["calls"] and value["valid_calls"] < _MOST_WRONG:
        yield Issue(
            f"{1 - value['valid_calls']:.0%} of calls cannot be read, or name no tool",
            "show a call in the prompt, or add the reward `tool_use`",
            "episode.on_malformed_call",
            level="warning",
            subject="episodes: calls",
            why="these turns are lost",
        )
    if value["failed_calls"] >= _MOST_WRONG:
        yield Issue(
            f"{value['failed_calls']:.0%} of calls fail, or take longer than {config.tool_timeout_s:g} s",
            "try the tools without a model by `grpo env test`",
            "episode.on_tool_error",
            level="warning",
            subject="episodes: calls",
            why="the model learns from error messages instead of results",
        )
