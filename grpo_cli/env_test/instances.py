"""Tools and environments tried one by one, without a model or its tokenizer: what they return, keep and leave."""

import hashlib
import io
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from grpo_cli.data.images import images_of
from grpo_cli.environments.calls import (
    BrokenEnvironmentError,
    Caller,
    Content,
    Outcome,
    decode_row,
    find_place,
    read_reward,
    run_call,
    run_chains,
    settle,
)
from grpo_cli.environments.contract import (
    Environment,
    EnvironmentSource,
    EpisodeError,
    ProcessEndedError,
    Tool,
)
from grpo_cli.environments.kinds.python import PythonEnvironment
from grpo_cli.environments.player import RESET_S
from grpo_cli.issues import Issue, Level
from grpo_cli.rewards.contract import text_of
from grpo_cli.units import count_noun

Row = Mapping[str, Any]
Action = str | tuple[str, Mapping[str, Any]]
"""An answer, or a call: a tool's name and its arguments."""
_ROWS = 4
"""Rows whose episodes are played twice, and beside another one."""
_SLOW_S = 2.0
"""Time of an episode from which only one row's is."""
_GRACE_S = 1.0
"""Time that threads have to end after `close`."""
_SEED_FIX = (
    "draw all that is random from it, as `random.Random(seed)` does, and keep all state on `self`"
)
_SEED_WHY = "completions of one prompt are compared, and would have different tasks"
WRONG = "1"
"""An answer that is hardly ever right."""
_EXAMPLES: dict[str, Any] = {
    "integer": 1,
    "number": 1.0,
    "boolean": True,
    "array": [],
    "null": None,
}


class _FaultError(Exception):
    """A call of a tool or an environment failed; it was reported."""


@dataclass
class Trial:
    """Calls one entry of `tools` or `environment`, and collects what is found of it."""

    path: str
    timeout_s: float
    caller: Caller = field(default_factory=Caller)
    tools: Sequence[Tool] = ()
    """Those that it offers; of environments, those of the first episode."""
    issues: dict[str, Issue] = field(default_factory=dict)
    """By what was seen, so that each is reported once."""
    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """By what was called."""
    results: list[str] = field(default_factory=list)
    """Texts that the model would read."""
    images: list[str] = field(default_factory=list)
    """The sizes of the images that it would read."""
    episodes: int = 0
    rewards: list[Any] = field(default_factory=list)
    """Of the episodes that were played to their end; None for one without a reward."""
    has_gold: bool = False
    """Whether any environment gave answers that should win."""

    def report(
        self, seen: str, fix: str, level: Level = "error", why: str = "", path: str = ""
    ) -> None:
        """Add an issue, at a path below the entry's, unless the same was seen before."""
        path = f"{self.path}.{path}".rstrip(".")
        self.issues.setdefault(seen, Issue(seen, fix, path, level=level, why=why))

    def run(
        self, name: str, function: Callable[[], Any], *, limit_s: float, level: Level = "error"
    ) -> Any:
        """Call a function of the user's under a time limit; raises `_FaultError` if it failed."""
        [outcome] = run_chains(
            [run_call(lambda: settle(function()))], parallel=1, timeout_s=limit_s
        )
        if outcome.fault:
            self._report_fault(name, outcome, level)
            raise _FaultError from outcome.error
        self.seconds[name].append(outcome.seconds)
        return outcome.value

    def run_tool(self, tool: Tool, arguments: Mapping[str, Any]) -> str:
        """Call a tool with arguments that are made up, so that it may refuse them; return what it says.

        Raises `_FaultError` if its process has ended.
        """
        name, call = f"{tool.name}()", partial(self.caller.call, tool, arguments)
        try:
            return self.keep(name, self.run(name, call, limit_s=self.timeout_s, level="note"))
        except _FaultError as fault:
            if isinstance(fault.__cause__, ProcessEndedError):
                raise
            return ""

    def keep(self, name: str, content: Content) -> str:
        """Keep what a call returned; return it as a text that is the same for the same images."""
        if name != "reset()":
            # What begins an episode is not a result, and not shortened.
            text = content if isinstance(content, str) else text_of([{"content": content}])
            self.results.append(text)
        if isinstance(content, str):
            return content
        pictures = images_of([{"content": content}])
        self.images += [f"{each.width}x{each.height}" for each in pictures]
        digests = (hashlib.sha256(each.tobytes()).hexdigest() for each in pictures)
        return str([part.get("text") or f"[image {next(digests)[:8]}]" for part in content])

    def _report_fault(self, name: str, outcome: Outcome, level: Level) -> None:
        where = find_place(outcome.error)
        at = f" ({where})" if where else ""
        if outcome.is_late:
            fix = "let it return in time, or raise the limit: `episode.tool_timeout_s`"
            self.report(f"{name} did not return within {outcome.seconds:g} s", fix)
        elif isinstance(outcome.error, SystemExit):
            fix = "return, or raise an error that says what is wrong"
            why = "it would end the process, not the episode"
            self.report(f"{name} calls exit(){at}", fix, why=why)
        else:
            fix = f"correct {where or name}"
            if isinstance(outcome.error, ProcessEndedError | BrokenEnvironmentError):
                level = "error"
            elif level == "note":
                fix += ", if it should take the arguments, which are made up from its schema"
            if isinstance(outcome.error, EpisodeError):
                error = outcome.error
                self.report(
                    f"{name} failed: {error.seen}", error.fix or fix, level, path=error.path
                )
            else:
                self.report(f"{name} raised {outcome.fault}{at}", fix, level)


@contextmanager
def watch_output(trial: Trial) -> Iterator[None]:
    """Keep what is printed out of stdout, and report it."""
    printed = io.StringIO()
    with redirect_stdout(printed):
        yield
    if first := next(filter(str.strip, printed.getvalue().splitlines()), ""):
        fix = "remove the print, or write to stderr: `print(…, file=sys.stderr)`"
        why = "it would garble logs and `--json`, once for each call"
        trial.report(f"prints to stdout: {first.strip()[:80]!r}", fix, "warning", why)


# --- tools -------------------------------------------------------------------------------------


def example_arguments(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments that a tool's schema allows: those that are required."""
    return _example_object(schema["function"].get("parameters") or {})


def _example_object(schema: Mapping[str, Any]) -> dict[str, Any]:
    properties = schema.get("properties") or {}
    return {name: _example(properties.get(name) or {}) for name in schema.get("required") or ()}


def _example(schema: Mapping[str, Any]) -> Any:
    if "const" in schema:
        return schema["const"]
    if choices := schema.get("enum"):
        return choices[0]
    for key in ("anyOf", "oneOf"):
        if schema.get(key):
            return _example(schema[key][0])
    kind = schema.get("type")
    kind = kind[0] if isinstance(kind, list) and kind else kind
    if kind == "array" and schema.get("items"):
        return [_example(schema["items"])]
    if kind == "object":
        return _example_object(schema)
    return _EXAMPLES.get(str(kind), WRONG)


def try_tool(trial: Trial, tool: Tool) -> None:
    """Call a tool once, with arguments made from its schema; that it refuses them is only noted."""
    with suppress(_FaultError):
        trial.run_tool(tool, example_arguments(tool.schema))


# --- environments ------------------------------------------------------------------------------


class _Play:
    """One instance, played move by move."""

    def __init__(self, trial: Trial, source: EnvironmentSource, row: Row, seed: int) -> None:
        self._trial, self._row, self.seed = trial, row, seed
        trial.episodes += 1
        self.taken: list[Action] = []
        self.said: list[str] = []
        """What the environment said: first, and to each action."""
        self.reward: Any = None
        self.is_over = False
        self.environment: Environment = trial.run("the class", source.make, limit_s=RESET_S)
        try:
            reset = partial(trial.caller.reset, self.environment, decode_row(row), seed)
            said = trial.run("reset()", reset, limit_s=RESET_S)
            self.said.append(trial.keep("reset()", said))
            if not self.said[0].strip() and not row["prompt"][-1]["content"]:
                seen = "reset() returns no text, and the dataset has no prompt: the model is asked nothing"
                trial.report(seen, "let it return what the model is to answer")
                raise _FaultError
        except _FaultError:
            self.close("close() after an error")
            raise

    def actions(self, most: int) -> Sequence[Action]:
        """Return what is done in an episode: a wrong answer, those that win, and wrong ones again."""
        golds = self._trial.run("gold()", self.environment.gold, limit_s=RESET_S) or ()
        self._trial.has_gold |= bool(golds)
        if not self.environment.takes_text:
            tools = self.environment.tools
            return [(tool.name, example_arguments(tool.schema)) for tool in tools]
        own = [each for each in golds if isinstance(each, str)]
        return [WRONG, *own, *[WRONG] * most][:most]

    def act(self, action: Action) -> None:
        """Take one action, unless the episode is over."""
        if self.is_over:
            return
        self.taken.append(action)
        if isinstance(action, str):
            step = partial(self._trial.caller.step, self.environment, action)
            said, self.is_over = self._trial.run("step()", step, limit_s=self._trial.timeout_s)
            self.said.append(self._trial.keep("step()", said))
        else:
            name, arguments = action
            tool = next(each for each in self.environment.tools if each.name == name)
            self.said.append(self._trial.run_tool(tool, arguments))
            self.is_over = bool(self.environment.is_done)

    @property
    def trace(self) -> str:
        """What is the same in each episode of the same seed and actions."""
        return repr((self.said, self.reward, self.is_over))

    def finish(self, when: str = "") -> None:
        """Read the reward, and close the instance; `when` is what messages add to the reward's name."""
        try:
            read = partial(read_reward, self.environment)
            self.reward = self._trial.run(f"reward(){when}", read, limit_s=RESET_S)
            self._trial.rewards.append(self.reward)
        finally:
            self.close("close()")

    def close(self, name: str) -> None:
        """Close the instance; an error is reported."""
        with suppress(_FaultError):
            self._trial.run(name, self.environment.close, limit_s=RESET_S)


def try_environment(
    trial: Trial, source: EnvironmentSource, rows: Sequence[Row], *, seed: int, max_turns: int
) -> None:
    """Play episodes of the rows twice, and beside one another."""
    few = list(rows[:_ROWS])
    play = partial(_play, trial, source, seed=seed, max_turns=max_turns)
    with suppress(_FaultError):
        # The first instance loads what all use.
        first = play(few[:1])
        trial.tools = first.environment.tools
        few = few if sum(map(sum, trial.seconds.values())) < _SLOW_S else few[:1]
        threads, before = set(threading.enumerate()), trial.episodes
        once = [play([row]) for row in few]
        twice = [play([row], alone.taken) for row, alone in zip(few, once, strict=True)]
        if all(_compare(trial, *pair) for pair in zip(once, twice, strict=True)):
            for row, other, alone in zip(few, [*rows[1:], rows[0]], once, strict=False):
                if play([row, other], alone.taken).trace != alone.trace:
                    seen = "instances share state: an episode goes another way while a second one is played"
                    trial.report(
                        seen, "keep all state in the instance: set it in reset(), on `self`"
                    )
        _check_end(trial, [*once, *twice], max_turns)
        _check_threads(trial, threads, trial.episodes - before)
        if first.environment.takes_text:
            _try_odd_answers(trial, source, few[0], first)
        else:
            # Most episodes of a model that has yet to learn calls end so.
            _Play(trial, source, few[0], seed).finish(" after an episode without a call")


def _play(
    trial: Trial,
    source: EnvironmentSource,
    rows: Sequence[Row],
    taken: Sequence[Action] = (),
    *,
    seed: int,
    max_turns: int,
) -> _Play:
    """Play episodes side by side, with the actions that another one took if they are given; return the first."""
    plays: list[_Play] = []
    try:
        # One by one, so that those before one that fails are closed.
        plays.extend(_Play(trial, source, row, seed) for row in rows)
        for action in taken or plays[0].actions(max_turns):
            for play in reversed(plays):
                play.act(action)
    except _FaultError:
        for play in plays:
            play.close("close() after an error")
        raise
    for play in reversed(plays):
        play.finish()
    return plays[0]


def _compare(trial: Trial, once: _Play, twice: _Play) -> bool:
    """Compare two episodes of the same seed and answers; return whether they are the same."""
    if once.trace == twice.trace:
        return True
    if once.said[0] != twice.said[0]:
        gives = f"{once.said[0]!r:.60}, then {twice.said[0]!r:.60}"
        seen = f"reset() does not follow from the seed: the same one gives {gives}"
        trial.report(seen, _SEED_FIX, "error", _SEED_WHY)
    elif (once.reward, once.is_over) != (twice.reward, twice.is_over):
        seen = "an episode does not follow from the seed: the same answers lead elsewhere each time"
        trial.report(seen, _SEED_FIX, "error", _SEED_WHY)
    else:
        seen = "what an environment says to the same answers does not follow from the seed"
        trial.report(seen, f"if it should, {_SEED_FIX}", "note")
    return False


def _check_end(trial: Trial, plays: Sequence[_Play], max_turns: int) -> None:
    """Find text environments whose episodes are never over."""
    if plays[0].environment.takes_text and not any(play.is_over for play in plays):
        own = "those of gold() among them" if trial.has_gold else "none of which may be right"
        seen = f"never ends: no episode was over after {count_noun(max_turns, 'answer')}, {own}"
        fix = "raise `episode.max_turns`"
        if isinstance(plays[0].environment, PythonEnvironment):
            fix = f"let step() return True as its second value once the episode is over, or {fix}"
        trial.report(seen, fix, "warning" if trial.has_gold else "note")


def _check_threads(trial: Trial, before: set[threading.Thread], episodes: int) -> None:
    """Find threads that stay when an episode is closed."""

    def left() -> list[threading.Thread]:
        new = set(threading.enumerate()) - before
        return [thread for thread in new if not thread.name.startswith("grpo-")]

    if len(left()) >= episodes:
        time.sleep(_GRACE_S)
    if len(threads := left()) >= episodes:
        seen = f"{len(threads)} threads still run after {episodes} episodes were closed"
        why = f"a training plays thousands of episodes; the first thread is {threads[0].name!r}"
        trial.report(seen, "end them in close(), and wait for them with join()", why=why)


def _try_odd_answers(trial: Trial, source: EnvironmentSource, row: Row, first: _Play) -> None:
    """Find environments that fail on answers which models give, nothing and far too much, or reward nothing."""
    for text in ("", "word " * 2000):
        play = _Play(trial, source, row, first.seed)
        what = "an empty answer" if not text else f"an answer of {len(text):,} characters"
        with suppress(_FaultError):
            step = partial(play.environment.step, text)
            trial.run(f"step() on {what}", step, limit_s=trial.timeout_s, level="warning")
            trial.seconds.pop(f"step() on {what}")
            if not text:
                reward = trial.run(
                    "reward()", partial(read_reward, play.environment), limit_s=RESET_S
                )
                _compare_rewards(trial, reward, first)
        play.close("close()")


def _compare_rewards(trial: Trial, reward: Any, first: _Play) -> None:
    """Compare the reward after an empty answer with that of an episode in which the gold was played."""
    best = first.reward
    if not first.is_over or {*first.taken} <= {WRONG} or best is None:
        return
    if reward is None:
        seen = "reward() returns None after an empty answer, so a completion without success gets no score"
        trial.report(seen, "return 0.0 there", "warning", "it is then not compared with others")
    elif reward == best:
        seen = (
            f"reward() gives {reward} to an empty answer, and as much to an episode with the gold"
        )
        trial.report(seen, "let reward() give more for playing right, or correct gold()", "warning")
