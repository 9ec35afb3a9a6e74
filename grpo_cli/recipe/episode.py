"""The `tools`, `environment` and `episode` sections: what the model acts in, turn by turn.

The parameters of each kind belong to `grpo_cli.environments`.
"""

from typing import Any, Literal

from pydantic import ConfigDict, Field

from grpo_cli.recipe.base import Integer, Number, Section


class KindConfig(Section):
    """One entry of `tools` or `environment`; keys that are not listed here are parameters of its `kind`."""

    model_config = ConfigDict(extra="allow")

    kind: str
    """The kind; `grpo env list` lists all kinds, `grpo env show KIND` the parameters of one."""
    when: str | None = None
    """Rows that it is for: a Jinja expression over the dataset's columns, such as `task == "search"`. Leave out
    for all rows."""

    @property
    def params(self) -> dict[str, Any]:
        """The kind's own parameters, as written."""
        return dict(self.model_extra or {})


class EpisodeConfig(Section):
    """An episode: the turns in which the model calls tools, or acts in an environment, until it is done.

    `generation.max_completion_length` limits the whole episode: the model's tokens and those of results.
    """

    max_turns: Integer = Field(default=8, ge=1)
    """Answers that the model may give; the episode ends after the last one."""
    max_turn_tokens: Integer | None = Field(default=None, ge=1)
    """Longest answer of a turn, in tokens; one that is cut off here ends the episode. By default only
    `generation.max_completion_length` limits it."""
    max_result_tokens: Integer = Field(default=256, ge=8)
    """Longest result of a call, or observation, in tokens; of a longer one the middle is left out."""
    tool_timeout_s: Number = Field(default=10.0, gt=0)
    """Time limit of a call, in seconds. A late call of an environment may still change it, so it ends the episode
    with a score of 0."""
    on_tool_error: Literal["tell", "zero", "raise"] = "tell"
    """What happens if a call fails or takes too long: `tell` gives the model the error as the call's result,
    `zero` ends the episode with a score of 0 from every reward, `raise` ends the run."""
    on_malformed_call: Literal["tell", "end"] = "tell"
    """What happens if a call cannot be parsed: `tell` gives the model the parser's message, `end` ends the
    episode."""
    images: bool = False
    """Whether tools and environments return images, which takes a vision-language model. They may, too, if
    `dataset.prompt.images` is set."""
    parallel: Integer = Field(default=16, ge=1)
    """Calls that run at the same time, over all episodes of a process; those of one episode run in order."""
