"""Rewards at work: called on batches, their results checked, failures explained, totals formed."""

import inspect
import io
import math
import os
import pickle
import re
import sysconfig
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import cached_property
from numbers import Real
from pathlib import Path
from typing import Any, Literal, TypeVar

from grpo_cli.errors import GrpoError, RewardError
from grpo_cli.recipe.dataset import IMAGES
from grpo_cli.rewards.contract import (
    EPISODE,
    Batch,
    DescribedError,
    Meta,
    Reads,
    RewardParams,
    Score,
    Scorer,
)
from grpo_cli.templating import environment

LARGEST = 1e18
"""Larger scores are refused: TRL's standard deviation sums their squares in float32, which overflows
and makes the gradient zero."""
SEARCH_S = 5.0
"""Longest search for the row that makes a whole batch fail."""
DOES_NOT_APPLY = Score(None, "`when` does not hold")
EPISODE_FAILED = Score(0.0, "a call failed", failed=True)
ROUNDING = 2.0**-22
"""Relative difference of two totals up to which rounding alone may explain it.

TRL keeps rewards and weights in float32, each up to 2⁻²⁴ off: a product is up to 2⁻²³ off, and the
difference of two sums of products up to 2⁻²².
"""

_USER_ERRORS = (Exception, SystemExit)
"""What a user's code may raise without meaning to end the run."""
_MOST_ROWS = 5
"""Rows named of those that fail."""
_SHOWN = 300
"""Characters shown of a prompt or completion."""
_FIX = 'write an expression on columns, such as when: task == "math"'

Clip = tuple[float, float] | None
"""Lowest and highest score; None leaves scores as they are."""


def weighted_sum(weights: Sequence[float], scores: Sequence[float | None]) -> float | None:
    """Return the total of a completion, as TRL forms it: scores that are None do not count.

    Returns:
        None if all scores are None.

    Source: `GRPOTrainer._generate_and_score_completions` (TRL 1.16), `nansum`.
    """
    known = [w * score for w, score in zip(weights, scores, strict=True) if score is not None]
    return sum(known) if known else None


def are_equal(totals: Sequence[float | None], scale: float | None = None) -> bool:
    """Return whether the totals of a group are equal up to rounding, so that no advantage differs from 0.

    Args:
        totals: One per completion; None (or NaN) if no reward scored it, which is ignored.
        scale: The largest sum of the absolute weighted scores of a completion. By default the largest
            absolute total, which is too small only if positive and negative rewards cancel.
    """
    known = [total for total in totals if total is not None and not math.isnan(total)]
    if len(known) < 2:
        return True
    largest = max(map(abs, known)) if scale is None else scale
    return max(known) - min(known) <= ROUNDING * largest


def clip_score(value: float, clip: Clip) -> float:
    """Return a score within `clip`."""
    return value if clip is None else min(max(value, clip[0]), clip[1])


@dataclass(frozen=True)
class Condition:
    """An expression such as `task == "math"`, evaluated by Jinja in `templating.py`'s sandbox."""

    text: str

    def columns(self) -> frozenset[str]:
        """Return the columns it reads; raises `RewardError` if it is not an expression."""
        from jinja2 import TemplateSyntaxError, nodes

        try:
            parsed = environment().parse("{{ (" + self.text + ") }}")
            # Also alone: `a) }}{{ (b` is two expressions in a template.
            _ = self._expression
        except TemplateSyntaxError as error:
            reason = (error.message or "").rstrip(".")
            seen = f"`when` cannot be read: `{self.text:.200}` is not one expression ({reason})"
            raise RewardError(seen, _FIX) from error
        return frozenset(each.name for each in parsed.find_all(nodes.Name)) - {"range"}

    def holds(self, batch: Batch, row: int) -> bool:
        """Return whether it holds on a row; raises `RewardError` if it fails there."""
        values = {name: column[row] for name, column in batch.columns.items()}
        try:
            return bool(self._expression(values))
        except Exception as error:  # an expression is a user's code: it raises anything
            raise RewardError(
                f"`when: {self.text}` fails on {batch.row_name(row)}: {error} "
                f"(columns: {', '.join(batch.columns)})",
                _FIX,
            ) from error

    @cached_property
    def _expression(self) -> Any:
        return environment().compile_expression(self.text, undefined_to_none=False)


@dataclass(frozen=True)
class Reward:
    """A reward of the recipe, ready to score."""

    name: str
    """Unique within the recipe."""
    weight: float
    """Factor in the weighted sum; `score` does not apply it."""
    kind: str
    params: RewardParams
    scorer: Scorer
    on_error: Literal["raise", "zero", "skip"] = "raise"
    clip: Clip = None
    condition: Condition | None = None
    """Which rows it applies to; None for all."""
    waits: bool = False
    """Whether it mostly waits for something outside of this process, and may do so on any thread."""
    right_answer: float | None = None
    """The score of a right answer; None if the recipe does not say that it judges answers."""
    reads: Reads = "last"
    """Which messages of a completion it reads."""
    path: str = ""
    """Its place in the recipe, such as `rewards.0`."""
    trainer_state: Any = None
    """That of batches that bring none, since they are scored outside of training."""

    @cached_property
    def meta(self) -> Meta:
        """Facts about it that are known without scoring."""
        return self.params.details()

    @property
    def forgives(self) -> bool:
        """True if training goes on when scoring fails: by `on_error`, or since a time limit gives a score."""
        limit = self.params.time_limit()
        return self.on_error != "raise" or (limit is not None and limit.late_score is not None)

    def score(self, batch: Batch) -> list[Score]:
        """Score a batch, with the recipe's `when`, `on_error` and `clip`.

        Returns:
            One score per completion, its value a finite float or None.

        Raises:
            RewardError: `when` fails on a row; or the reward raised, returned another number of
                scores, or one that is not a usable number, and `on_error` is `raise`. Its text
                names the reward and the row.
        """
        state = batch.extra.get("trainer_state") or self.trainer_state
        extra = {**batch.extra, "trainer_state": state}
        batch = replace(batch, reads=self.reads, extra=extra)
        scores = [DOES_NOT_APPLY] * len(batch.completions)
        applying, records = self._applying(batch), batch.columns.get(EPISODE)
        failed = {row for row in applying if records and records[row]["end"] == "failed"}
        rows = [row for row in applying if row not in failed]
        for row in failed:
            scores[row] = EPISODE_FAILED
        if rows:
            part = batch
            if len(rows) < len(scores):
                # `log_extra` takes a value for each completion of the whole batch.
                extra.pop("log_extra", None)
                part = replace(batch.take(rows), extra=extra)
            for row, result in zip(rows, self.try_score(part), strict=True):
                scores[row] = self._settle(result)
        return scores

    def try_score(self, batch: Batch) -> list[Score | RewardError]:
        """Return one score per completion, or the failure; ignores `when` and `clip`.

        If a whole batch fails and `on_error` forgives, its rows are scored one by one.
        """
        size = len(batch.completions)
        try:
            results = list(self.scorer(batch))
            if len(results) != size:
                raise DescribedError(
                    f"{self} returned {len(results)} scores for {size} completions",
                    "return one number a completion",
                )
        except KeyboardInterrupt as error:
            # Never forgiven: it may be the user who asks to stop.
            raise self.failure(batch, [], error) from error
        except _USER_ERRORS as error:
            if self.on_error != "raise" and size > 1:
                return [self.try_score(batch.take([row]))[0] for row in range(size)]
            return [self.failure(batch, self._find_rows(batch, error), error)] * size
        return [self._check(result, batch, row) for row, result in enumerate(results)]

    def __str__(self) -> str:
        return f"reward {self.name!r} ({self.kind})"

    def failure(self, batch: Batch, rows: Sequence[int], error: BaseException) -> DescribedError:
        """Return the error of a reward that failed on rows, or on a batch without any: where, on what, and why."""
        if isinstance(error, DescribedError):
            return error
        what, inputs, row = f"a batch of {len(batch.completions)}", [], next(iter(rows), None)
        if row is not None:
            empty = "" if batch.texts[row].strip() else ", whose completion is empty"
            name, *others = dict.fromkeys(map(batch.row_name, rows))
            what, inputs = f"{name}{empty}", _inputs(batch, row)
            if others:
                what += f" (also on {', '.join(others)})"
        where = ", ".join(filter(None, (self.path, find_line(error))))
        seen = f"{self} failed on {what}{f' ({where})' if where else ''}: {summarize(error)}"
        path = ".".join(filter(None, (self.path, getattr(error, "path", ""))))
        fix = self._find_fix(batch, row or 0, error)
        failure = DescribedError(seen, fix, path, [*inputs, *format_trace(error)])
        failure.row_id = None if row is None else batch.columns.get("row_id", {row: None})[row]
        failure.__cause__ = error
        return failure

    def _find_fix(self, batch: Batch, row: int, error: BaseException) -> str:
        """Return what most often mends a reward that failed so; empty if nothing does."""
        named = [each for each in self.params.columns().named if each in batch.columns]
        empty = [name for name in named if batch.columns[name][row] is None]
        if "'NoneType'" in str(error) and empty:
            return f"fill the column `{empty[0]}` there, or leave such rows out"
        own = error.fix if isinstance(error, GrpoError) else ""
        return own or failure_fix(error, batch.completions[row])

    def _applying(self, batch: Batch) -> list[int]:
        rows = range(len(batch.completions))
        if self.condition is None:
            return list(rows)
        try:
            return [row for row in rows if self.condition.holds(batch, row)]
        except RewardError as error:
            raise error.about(str(self)) from error

    def _settle(self, result: Score | RewardError) -> Score:
        if not isinstance(result, Score):
            if self.on_error == "raise":
                raise result
            value = 0.0 if self.on_error == "zero" else None
            late = isinstance(result, DescribedError) and result.late
            result = Score(value, result.headline, failed=True, late=late)
        if result.value is None:
            return result
        return result._replace(value=clip_score(result.value, self.clip))

    def _find_rows(self, batch: Batch, error: BaseException) -> list[int]:
        """Return the first rows that raise the same kind of error on their own."""
        if isinstance(error, DescribedError):
            return []
        deadline, found = time.monotonic() + SEARCH_S, list[int]()
        for row in range(len(batch.completions)):
            if time.monotonic() > deadline or len(found) == _MOST_ROWS:
                break
            try:
                self.scorer(batch.take([row]))
            except _USER_ERRORS as again:
                if type(again) is type(error):
                    found.append(row)
        return found

    def _check(self, result: Score | Exception, batch: Batch, row: int) -> Score | RewardError:
        if isinstance(result, Exception):
            return self.failure(batch, [row], result)
        if result.value is None:
            return result
        value = as_float(result.value)
        fault = _value_fault(value, self.weight)
        if value is not None and not fault:
            return result._replace(value=value)
        fix = "return a finite number, or None if the reward does not apply"
        if inspect.iscoroutine(result.value):
            result.value.close()
            fix = "await what it returns: make the function `async`"
        shown = shorten(repr(result.value), 80)
        seen = f"{self} returned {shown} for {batch.row_name(row)}, which {fault}"
        return DescribedError(seen, fix, details=_inputs(batch, row))


def as_float(value: Any) -> float | None:
    """Return a number of any library (numpy, torch, Decimal, bool) as a float; None if it is none."""
    if getattr(value, "ndim", None) == 0:
        value = value.item()
    try:
        return float(value) if isinstance(value, Real | Decimal) else None
    except OverflowError:
        return math.inf


def _value_fault(value: float | None, weight: float) -> str:
    if value is None:
        return "is not a number"
    if not math.isfinite(value):
        return "is not finite"
    if max(abs(value), abs(value * weight)) > LARGEST:
        return f"is too large (with weight {weight:g}; the limit is {LARGEST:g})"
    return ""


def shorten(text: str, limit: int = _SHOWN) -> str:
    """Return the text; if it is longer than `limit`, without its middle."""
    if len(text) <= limit:
        return text
    return f"{text[: limit * 2 // 3]} … {text[-(limit - limit * 2 // 3) :]}"


def _inputs(batch: Batch, row: int) -> list[str]:
    """Show values as the function got them: messages taken for text are the commonest mistake."""
    pairs = (("prompt", batch.prompts), ("completion", batch.completions))
    return [f"  {label}: {shorten(repr(values[row]))}" for label, values in pairs]


def reward_columns(rows: Any, rewards: Sequence[Reward]) -> dict[str, list[Any]]:
    """Return the columns of a `Dataset` as rewards get them; images decoded, if a reward may look at them."""
    if IMAGES not in rows.column_names:
        return dict(rows[:])
    columns = dict(rows.remove_columns([IMAGES])[:])
    if any(reward.meta.reads_images for reward in rewards):
        columns[IMAGES] = list(rows[IMAGES])
    return columns


def has_state(reward: Reward) -> bool:
    """Return whether a reward offers a state for checkpoints to keep."""
    return hasattr(reward.scorer, "state_dict")


def read_state(reward: Reward) -> Any:
    """Return a copy of a reward's state, made as a checkpoint makes it.

    Raises:
        RewardError: It cannot be read, or holds what a checkpoint could not restore.
    """
    import torch

    buffer = io.BytesIO()
    try:
        torch.save(reward.scorer.state_dict(), buffer)  # type: ignore[attr-defined]
        buffer.seek(0)
        return torch.load(buffer, weights_only=True)
    except Exception as error:
        other = isinstance(error, pickle.UnpicklingError)
        why = "it holds objects of other classes" if other else f"{error!r:.300}"
        raise RewardError(
            f"the state of reward {reward.name!r} cannot be kept in a checkpoint: {why}",
            "let its state_dict() return numbers, texts, lists, dicts, sets and tensors",
        ) from error


_IMPORT_FIXES: tuple[tuple[type[BaseException], str], ...] = (
    (ModuleNotFoundError, "install the package that has this module, or correct the import"),
    (
        FileNotFoundError,
        "write a path that starts at the file that opens it: `Path(__file__).parent / …`",
    ),
    (SystemExit, 'put what the script does under `if __name__ == "__main__":`'),
    (EOFError, 'put what reads standard input under `if __name__ == "__main__":`'),
    (BaseException, "correct what the last line of the traceback names"),
)
Failure = TypeVar("Failure", bound=GrpoError)
_HIDDEN = (
    str(Path(__file__).parents[1]),
    str(Path(os.__file__).parent / "asyncio"),
    "<frozen importlib",
)
"""Paths whose frames are left out of tracebacks."""
_LIBRARIES = (str(Path(os.__file__).parent), sysconfig.get_path("purelib"))


def explain_build(kind: type[Failure], subject: str, error: BaseException, path: str) -> Failure:
    """Return the error of a reward, tool or environment whose own code failed while it was imported."""
    line, summary = find_line(error), summarize(error).rstrip(".")
    where = f" ({line})" if line else ""
    seen = f"{subject} could not be loaded{where}: {summary}"
    return kind(seen, import_fix(error), path, format_trace(error))


def find_line(error: BaseException) -> str:
    """Return the file's name and the line of the user's code that failed; empty if it was elsewhere."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [each for each in frames if not each.filename.startswith((*_HIDDEN, *_LIBRARIES))]
    return f"{Path(own[-1].filename).name}:{own[-1].lineno}" if own else ""


def failure_fix(error: BaseException, completion: Any) -> str:
    """Return what most often mends a function that failed on a completion; empty if nothing does."""
    if isinstance(error, ModuleNotFoundError | FileNotFoundError):
        return import_fix(error)
    message = str(error)
    if not isinstance(error, AttributeError | TypeError):
        return ""
    if "'NoneType'" in message:
        return "test for None first: `re.search` finds nothing in most completions"
    if isinstance(completion, str) and ("string ind" in message or "'str' object" in message):
        return (
            "if it takes completions for messages: prompts are plain text here, so each is a string"
        )
    if not isinstance(completion, str) and re.search(r"\b(?:list|dict|string ind\w+)\b", message):
        return (
            "if it takes completions for texts: prompts are conversations here, so each is a list of messages; "
            'read its text: `completion[-1]["content"]`'
        )
    return ""


def import_fix(error: BaseException) -> str:
    """Return what most often mends a file that cannot be imported."""
    if isinstance(error, ImportError) and "relative import" in str(error):
        return "import by the file's name alone, as its folder is on the path: `import helpers`"
    return next(fix for type_, fix in _IMPORT_FIXES if isinstance(error, type_))


def summarize(error: BaseException) -> str:
    """Return the type and the message of an error; the message alone of one of our own."""
    if isinstance(error, RewardError):
        return error.seen
    return traceback.format_exception_only(error)[-1].strip()


def format_trace(error: BaseException) -> list[str]:
    """Return the traceback without our frames; empty for errors of our own."""
    if isinstance(error, RewardError):
        return []
    whole = traceback.TracebackException.from_exception(error)
    part: traceback.TracebackException | None = whole
    while part is not None:
        frames = [frame for frame in part.stack if _is_users(frame)]
        part.stack = traceback.StackSummary.from_list(frames)
        part = part.__cause__ or part.__context__
    return "".join(whole.format()).rstrip().splitlines()


def _is_users(frame: traceback.FrameSummary) -> bool:
    return not frame.filename.startswith(_HIDDEN)
