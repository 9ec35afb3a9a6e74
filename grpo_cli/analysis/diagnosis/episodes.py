"""Rules on episodes: whether tools are called, what becomes of the calls, and what ends an episode."""

from statistics import fmean

from grpo_cli.analysis.diagnosis.history import LIKELY, History, lasting_share
from grpo_cli.analysis.diagnosis.rule import Rule
from grpo_cli.issues import Issue, Level
from grpo_cli.recipe.recipe import Recipe

_CALLS, _TURNS = "tools/call_frequency", "episode/turns"
_BUDGETS = ("episode/end/tokens", "episode/end/cut_off", "episode/end/turns")
_FEWEST_CALLS, _FALLEN = 0.1, 0.25
"""Calls an episode; a share of those that the run began with."""
_MOST_MALFORMED, _MOST_FAILED, _NEARLY_ALL = 0.1, 0.2, 0.9
"""Shares of calls."""
_MOST_REPEATED, _MOST_ENDED, _SLOW = 0.5, 0.5, 0.5
"""Shares of calls, of episodes, and of a step's time."""


def single_turn(recipe: Recipe) -> str | None:
    """Return why a rule about episodes does not apply to a recipe, or None."""
    return None if recipe.has_episodes else "there are no tools and no environment"


def _level(history: History, level: Level = "warning") -> Level:
    """Return the level of what need not matter while the reward rises."""
    return "note" if history.has_risen(LIKELY) else level


def _shares_of_calls(history: History, *kinds: str) -> list[float]:
    """Return the share of calls of some kinds in each of the last 10 records."""
    counts = zip(*(history.last(f"tools/{kind}") for kind in kinds), strict=False)
    calls = history.last(_CALLS)
    return [sum(each) / total for each, total in zip(counts, calls, strict=False) if total > 0]


def _reward_form(history: History) -> str:
    """Return the fix of rewarding well-formed calls; empty if the recipe does."""
    known = "tool_use" in {entry.kind for entry in history.recipe.rewards}
    return "" if known else "`rewards: [..., {kind: tool_use, weight: 0.1}]`, or "


@Rule(
    "tools are not called",
    (_CALLS, _TURNS),
    threshold=f"a mean below {_FEWEST_CALLS} calls an episode, or below {_FALLEN:.0%} of the first 5 records; "
    "the reward not near its highest; a note if it rises",
    source="ours: an episode without a call is one answer; fewer calls without a worse reward may be skill",
    skip_reason=single_turn,
)
def tools_unused(history: History) -> Issue | None:
    """A model that stops calling its tools answers from memory, and no longer learns to use them."""
    calls, turns, change = history.mean(_CALLS), history.mean(_TURNS), history.change(_CALLS)
    if calls is None or turns is None or history.is_near_best():
        return None
    fell = change is not None and change.falls((1 - _FALLEN) * change.before)
    cut_off = sum(history.mean(metric) or 0.0 for metric in _BUDGETS[:2])
    # An answer that is cut off calls nothing: `budget_ends_episodes` reports that.
    if not (calls < _FEWEST_CALLS or fell) or cut_off > _MOST_ENDED:
        return None
    began = f"; it began with {change.before:.2g}" if fell and change else ""
    seen = (
        f"the model made {calls:.2g} calls an episode in the last 10 records (at least {_FEWEST_CALLS}), "
        f"in {turns:.2g} turns{began}"
    )
    fix = f"{_reward_form(history)}a prompt that says when to call which tool"
    return Issue(seen, fix, level=_level(history))


@Rule(
    "calls cannot be parsed",
    ("tools/malformed", _CALLS),
    threshold=f"a mean above {_MOST_MALFORMED:.0%} of the calls that does not fall; a note if the reward rises",
    source="ours: a model that was trained to call tools makes few; each costs a turn",
    skip_reason=single_turn,
)
def malformed_calls(history: History) -> Issue | None:
    """A call that cannot be parsed does nothing, and its turn is lost."""
    share = lasting_share(_shares_of_calls(history, "malformed"), _MOST_MALFORMED)
    if share is None:
        return None
    seen = (
        f"{share:.0%} of the calls of the last 10 records cannot be parsed (at most "
        f"{_MOST_MALFORMED:.0%}), and no fewer towards the end"
    )
    fix = f"{_reward_form(history)}a model that was trained to call tools in this chat template's format"
    return Issue(seen, fix, level=_level(history))


@Rule(
    "calls fail",
    ("tools/failed", "tools/late", "tools/unknown", _CALLS),
    threshold=f"a mean above {_MOST_FAILED:.0%} of the calls that does not fall (an error above "
    f"{_NEARLY_ALL:.0%}); a note if the reward rises",
    source="ours: some calls fail while a model learns a tool; above a fifth, look at the tool",
    skip_reason=single_turn,
)
def tool_failures(history: History) -> Issue | None:
    """A call that fails gives the model an error to read instead of a result."""
    kinds = ("failed", "late", "unknown")
    share = lasting_share(_shares_of_calls(history, *kinds), _MOST_FAILED)
    if share is None:
        return None
    means = {kind: fmean(_shares_of_calls(history, kind)) for kind in kinds}
    most = max(means, key=lambda kind: means[kind])
    parts = ", ".join(f"{mean:.0%} {kind}" for kind, mean in means.items() if mean)
    seen = (
        f"{share:.0%} of the calls of the last 10 records failed (at most {_MOST_FAILED:.0%}), and no "
        f"fewer towards the end: {parts}"
    )
    limit = history.recipe.episode.tool_timeout_s
    fix = {
        "failed": "read the errors in `completions/`, and correct the tool, or its description of the arguments",
        "late": f"`episode.tool_timeout_s: {2 * limit:g}`, or a faster tool",
        "unknown": "a prompt that names the tools there are",
    }[most]
    severe: Level = "error" if share > _NEARLY_ALL else "warning"
    return Issue(seen, fix, level=_level(history, severe))


@Rule(
    "limits end episodes",
    _BUDGETS,
    threshold=f"a mean above {_MOST_ENDED:.0%} that does not fall, the reward not near its highest; a note if "
    "the reward rises, or if most end by `max_turns`",
    source="ours: the threshold of truncation; a game may well have a number of turns",
    skip_reason=single_turn,
)
def budget_ends_episodes(history: History) -> Issue | None:
    """An episode that a limit ends is scored before it is over."""
    records = list(zip(*map(history.last, _BUDGETS), strict=False))
    share = lasting_share([sum(each) for each in records], _MOST_ENDED)
    if share is None or history.is_near_best():
        return None
    episode, longest = history.recipe.episode, history.recipe.generation.max_completion_length
    fixes = {
        "max_completion_length": f"`generation.max_completion_length: {2 * longest}`",
        "max_turn_tokens": f"`episode.max_turn_tokens: {2 * (episode.max_turn_tokens or longest)}`",
        "max_turns": f"`episode.max_turns: {2 * episode.max_turns}`",
    }
    means = dict(zip(fixes, map(fmean, zip(*records, strict=True)), strict=True))
    most = max(means, key=lambda limit: means[limit])
    parts = ", ".join(f"{mean:.0%} by {limit}" for limit, mean in means.items() if mean)
    seen = (
        f"limits ended {share:.0%} of the episodes of the last 10 records (at most {_MOST_ENDED:.0%}), "
        f"and no fewer towards the end: {parts}"
    )
    fix = f"{fixes[most]}, or a prompt that asks for {'fewer turns' if most == 'max_turns' else 'less text'}"
    level: Level = "note" if means["max_turns"] > _MOST_ENDED else "warning"
    return Issue(seen, fix, level=_level(history, level))


@Rule(
    "calls repeat what is known",
    ("tools/repeated", _CALLS),
    threshold=f"a mean above {_MOST_REPEATED:.0%} of the calls that does not fall, the reward not near its "
    "highest; a note if it rises",
    source="ours: the same call with the same result tells the model nothing; some repeats are slips",
    skip_reason=single_turn,
)
def repeated_calls(history: History) -> Issue | None:
    """The model asks the same again in one episode, and gets the same result."""
    share = lasting_share(_shares_of_calls(history, "repeated"), _MOST_REPEATED)
    if share is None or history.is_near_best():
        return None
    seen = (
        f"{share:.0%} of the calls of the last 10 records repeat one of their episode and its result (at "
        f"most {_MOST_REPEATED:.0%}), and no fewer towards the end"
    )
    turns = history.recipe.episode.max_turns
    fix = f"`episode.max_turns: {max(turns // 2, 1)}`, or results that say what to do instead"
    return Issue(seen, fix, level=_level(history))


@Rule(
    "tools take most of the time",
    ("time/tools", "time/learning"),
    threshold=f"above {_SLOW:.0%} of the time of all phases",
    source="ours: above half, faster tools save more than any other change",
    skip_reason=single_turn,
)
def slow_tool(history: History) -> Issue | None:
    """The devices wait while tools and environments work."""
    spent, share = history.time_in("tools")
    if share <= _SLOW:
        return None
    seen = (
        f"tools and environments took {share:.0%} of the time of the last 10 records (at most "
        f"{_SLOW:.0%}), {spent:.2g} s a step"
    )
    parallel = history.recipe.episode.parallel
    fix = f"`episode.parallel: {2 * parallel}` if the tool can take as many calls at a time, or a faster tool"
    return Issue(seen, fix, level="note")
