"""Tools and environments of a recipe tried without a model: what is wrong, and does playing right win?"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from grpo_cli.env_test.agents import GOLD, AgentResult, Totals, make_agents, play_agent
from grpo_cli.env_test.instances import Row, Trial, try_environment, try_tool, watch_output
from grpo_cli.environments.calls import Caller
from grpo_cli.environments.contract import Tool, ToolSource
from grpo_cli.environments.player import Player, find_rows, open_player
from grpo_cli.environments.registry import open_kind
from grpo_cli.errors import GrpoError
from grpo_cli.issues import Issue
from grpo_cli.models.processor import tokenizer_of
from grpo_cli.recipe.recipe import Recipe
from grpo_cli.units import spread

Progress = Callable[[str], None]
ROWS = 16
_MOST_RESET_S = 5.0
"""Time that the resets of an agent's episodes may take, one after another, before fewer rows are played."""
_LEVELS = ("error", "warning", "note")
_LIMITS = {
    "cut_off": "episode.max_turn_tokens",
    "turns": "episode.max_turns",
    "tokens": "generation.max_completion_length",
}
"""The limit of the recipe by how it ends an episode."""


@dataclass(frozen=True)
class ToolResult:
    """A tool, as the model sees it."""

    name: str
    arguments: dict[str, str]
    """Their types by name; those that may be left out end with `?`."""
    description: str
    path: str
    """Of its entry in the recipe."""


@dataclass(frozen=True)
class Latency:
    """How long calls took, in seconds."""

    calls: int
    median: float
    worst: float


@dataclass(frozen=True)
class ResultTokens:
    """How long results and observations are, in tokens."""

    results: int
    median: float
    longest: int


@dataclass(frozen=True)
class EnvironmentTestResult:
    """What was tried, what it took, and what is wrong."""

    rows: int
    tools: tuple[ToolResult, ...]
    latency: dict[str, Latency]
    result_tokens: ResultTokens | None
    images: dict[str, int]
    """How many images were returned before agents played, by their size in pixels."""
    agents: tuple[AgentResult, ...]
    skipped: str
    """What was not tried, and why; empty if all was."""
    problems: tuple[Issue, ...]
    """The worst first."""

    @property
    def failed(self) -> bool:
        """True if anything is wrong enough not to train with it."""
        return any(problem.level == "error" for problem in self.problems)

    def as_json(self) -> dict[str, Any]:
        """Return the result as plain values."""
        return {**asdict(self), "problems": [problem.as_json() for problem in self.problems]}


def try_environments(
    recipe: Recipe,
    rows: Sequence[Row],
    *,
    processing_class: Any,
    stops: Sequence[int],
    score: Totals,
    all_rows: bool = False,
    on_progress: Progress = lambda what: None,
) -> EnvironmentTestResult:
    """Try a recipe's tools and environments, one by one, then with agents that play its episodes.

    There are no rows if the data is not at hand. Without a `processing_class` (see `open_player`) no agent plays.
    With `all_rows`, agents play all of them, even if it takes long to reset an environment.
    """
    trials, problems = _try_entries(recipe, rows, on_progress)
    tools = tuple(_describe(tool, trial.path) for trial in trials for tool in trial.tools)
    agents: list[AgentResult] = []
    skipped = ""
    if any(problem.level == "error" for problem in problems):
        skipped = "no agent played: there are errors to correct first"
    elif not rows:
        skipped = "no agent played: the rows of the dataset are not on this machine"
    elif processing_class is None:
        skipped = "no agent played, and no tokens were counted: the model's tokenizer is not on this machine"
    else:
        trial = Trial("environment" if recipe.environment else "tools", 0.0)
        rows = rows if all_rows else _limit_rows(trial, rows, trials)
        with watch_output(trial):
            player = open_player(recipe, processing_class, stops=stops)
            agents = _play_agents(recipe, rows, player, score, trial, trials, on_progress)
        trials.append(trial)
        problems += trial.issues.values()
    tokenizer = processing_class and tokenizer_of(processing_class)
    tokens = [
        len(tokenizer(text, add_special_tokens=False)["input_ids"])
        for trial in (trials if tokenizer else ())
        for text in trial.results
    ]
    most = recipe.episode.max_result_tokens
    if over := [count for count in tokens if count > most]:
        seen = f"{most} shortens {len(over)} of {len(tokens)} results; the longest has {max(over)} tokens"
        fix, path = "raise it, or let them say less", "episode.max_result_tokens"
        problems.append(Issue(seen, fix, path, level="warning"))
    spent: dict[str, list[float]] = defaultdict(list)
    for name, each in ((name, each) for trial in trials for name, each in trial.seconds.items()):
        spent[name] += each
    unique = list({problem.seen: problem for problem in reversed(problems)}.values())[::-1]
    return EnvironmentTestResult(
        rows=len(rows),
        tools=tools,
        latency={name: Latency(len(each), median(each), max(each)) for name, each in spent.items()},
        result_tokens=ResultTokens(len(tokens), median(tokens), max(tokens)) if tokens else None,
        images=dict(Counter(size for trial in trials for size in trial.images)),
        agents=tuple(agents),
        skipped=skipped,
        problems=tuple(sorted(unique, key=lambda problem: _LEVELS.index(problem.level))),
    )


# --- one by one --------------------------------------------------------------------------------


def try_instances(recipe: Recipe, rows: Sequence[Row]) -> list[Issue]:
    """Return what is wrong with environments that are tried one by one, before an agent plays."""
    # A tool is called with arguments that are made up, which is for `grpo env test` alone.
    return _try_entries(recipe.model_copy(update={"tools": ()}), rows, lambda what: None)[1]


def _try_entries(
    recipe: Recipe, rows: Sequence[Row], on_progress: Progress
) -> tuple[list[Trial], list[Issue]]:
    """Open all entries, try what each gives, and close them; return what is wrong too."""
    trials = []
    left = list(rows)
    with ExitStack() as stack:
        for section in ("tools", "environment"):
            for index, config in enumerate(getattr(recipe, section)):
                on_progress(f"trying {config.kind}")
                caller = Caller(recipe.has_images)
                trial = Trial(f"{section}.{index}", recipe.episode.tool_timeout_s, caller)
                trials.append(trial)
                # A row takes the first environment whose condition holds.
                places = find_rows(config.when, left)
                own = [row for number, row in enumerate(left) if number in places]
                if section == "environment":
                    left = [row for row in left if row not in own]
                with watch_output(trial), _reporting(trial):
                    source = open_kind(section, config)
                    stack.callback(source.close)
                    _try_entry(trial, source, own, recipe, len(rows))
    problems = [issue for trial in trials for issue in trial.issues.values()]
    rewards = [reward for trial in trials for reward in trial.rewards]
    is_scored = any(reward.kind == "environment" for reward in recipe.rewards)
    if is_scored and rewards and all(reward is None for reward in rewards):
        seen = "the environment has no reward(), or it returns None, so the reward `environment` never applies"
        fix = "write reward(), which returns a number or a dict of named ones"
        problems.append(Issue(seen, fix, "environment"))
    empty = [row for row in left if not row["prompt"][-1]["content"]]
    if recipe.environment and empty:
        seen = f"no `when` holds for {len(empty)} of the {len(rows)} rows that were tried: they have no prompt"
        fix = "widen a `when`, or leave it out of the last environment"
        problems.append(Issue(seen, fix, "environment"))
    return trials, problems


@contextmanager
def _reporting(trial: Trial) -> Iterator[None]:
    """Report the error that ends what is done inside."""
    try:
        yield
    except GrpoError as error:
        issue = error.as_issue(f"{trial.path}.{error.path}".rstrip("."))
        trial.issues[issue.seen] = issue


def _try_entry(trial: Trial, source: Any, rows: Sequence[Row], recipe: Recipe, tried: int) -> None:
    if isinstance(source, ToolSource):
        trial.tools = source.tools
        for tool in trial.tools:
            try_tool(trial, tool)
    elif rows:
        turns = recipe.episode.max_turns
        try_environment(trial, source, rows, seed=recipe.seed, max_turns=turns)
    else:
        seen = f"none of the {tried} rows that were tried is for it"
        trial.report(seen, "correct `when`, or try more rows: `--rows`", "note")


def _describe(tool: Tool, path: str) -> ToolResult:
    function = tool.schema["function"]
    parameters = function.get("parameters") or {}
    required = parameters.get("required") or ()
    arguments = {
        name + ("" if name in required else "?"): " | ".join(_list_types(schema))
        for name, schema in (parameters.get("properties") or {}).items()
    }
    text = " ".join(str(function.get("description") or "").split())
    return ToolResult(tool.name, arguments, text, path)


def _list_types(schema: Mapping[str, Any]) -> list[str]:
    kind = schema.get("type") or "any"
    kinds = kind if isinstance(kind, list) else [str(kind)]
    return [*map(repr, schema.get("enum") or ())] or kinds


# --- agents ------------------------------------------------------------------------------------


def _limit_rows(trial: Trial, rows: Sequence[Row], tried: Iterable[Trial]) -> Sequence[Row]:
    """Return as many rows as can be played in some seconds; note if those are not all."""
    reset_s = max((median(each.seconds.get("reset()") or [0.0]) for each in tried), default=0.0)
    most = max(int(_MOST_RESET_S / max(reset_s, 0.01)), 1)
    if most >= len(rows):
        return rows
    seen = f"agents played {most} of {len(rows)} rows, since each reset takes {reset_s:.1f} s"
    trial.report(seen, f"try all, if there is time: `--rows {len(rows)}`", "note")
    return [rows[place] for place in spread(len(rows), most)]


def _play_agents(
    recipe: Recipe,
    rows: Sequence[Row],
    opening: AbstractContextManager[Player],
    score: Totals,
    trial: Trial,
    trials: Sequence[Trial],
    on_progress: Progress,
) -> list[AgentResult]:
    """Play the episodes of the rows with each agent; `trial` keeps what is wrong, `trials` have what was tried."""
    results: list[AgentResult] = []
    try:
        with opening as player:
            has_gold = any(each.has_gold for each in trials)
            has_tools = any(each.tools for each in trials)
            agents = make_agents(player.dialogue, has_gold=has_gold, has_tools=has_tools)
            for name, answers in agents.items():
                on_progress(f"playing the agent {name}")
                results.append(play_agent(player, rows, name, answers, score, trial))
        _judge(recipe, results, trial)
    except GrpoError as error:
        issue = error.as_issue(error.path or trial.path)
        trial.issues[issue.seen] = issue
    return results


def _judge(recipe: Recipe, results: Sequence[AgentResult], trial: Trial) -> None:
    """Find rewards that do not tell playing right from anything else."""
    gold = next((each for each in results if each.name == GOLD), None)
    if gold is None:
        if recipe.environment:
            seen = "whether playing right wins was not tried: there is no gold()"
            is_own = any(config.kind == "python" for config in recipe.environment)
            fix = "add `def gold(self)`, which returns the answers that win after reset()"
            trial.report(seen, fix if is_own else "", "note")
        return
    if gold.failures:
        seen = f"{sum(gold.failures.values())} calls of the gold fail"
        trial.report(seen, "correct the tool, or gold()", "warning")
    for each in results:
        if each.name == GOLD or each.reward is None or gold.reward is None:
            continue
        if each.reward < gold.reward:
            continue
        if gold.ends.keys() <= _LIMITS.keys():
            limits = ", ".join(f"`{_LIMITS[end]}`" for end in gold.ends)
            seen = "limits end all episodes of the gold, and it does not win"
            trial.report(seen, f"raise {limits}")
            return
        seen = f"the agent {each.name!r} gets {each.reward:.3g} on average, and the gold {gold.reward:.3g}"
        fix = "let reward() give more for playing right, or correct gold()"
        trial.report(seen, fix, why="a model would learn to play like it")
