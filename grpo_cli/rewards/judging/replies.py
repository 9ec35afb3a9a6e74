"""What the judge replies: its JSON Schema, and the strict reading of it.

Owns the shape of verdicts. Asking again after a reply that cannot be used is `endpoint.py`'s.
"""

import json
import math
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

ReplyForm = Literal["json_schema", "json_object", "text"]
REASON_LENGTH = 200
"""Characters kept of a justification."""

_MANY_OBJECTS = 200
"""Opening braces looked at in a reply's prose."""


class ReplyError(Exception):
    """A reply that cannot be used; the text says why."""


class Verdict(NamedTuple):
    """The judge's score of one answer, on the judge's scale."""

    score: float
    reason: str


def response_format(form: ReplyForm, answers: int) -> dict[str, Any] | None:
    """The request's `response_format`; None for plain text."""
    if form == "text":
        return None
    if form == "json_object":
        return {"type": "json_object"}
    schema = {"name": "verdict", "strict": True, "schema": _schema(answers)}
    return {"type": "json_schema", "json_schema": schema}


def read_reply(
    text: str, answers: int, scale: tuple[float, float], *, tolerant: bool
) -> tuple[Verdict, ...]:
    """The verdicts of a reply, in the order of the answers' numbers.

    Args:
        text: The reply; a reasoning judge's thoughts may stand before it.
        answers: How many answers were shown.
        scale: Lowest and highest score.
        tolerant: Whether the JSON may stand in a code fence or among prose. Several objects that
            differ are refused all the same: one may be a quotation of the answer.

    Raises:
        ReplyError: The reply is not of the shape asked for, or a score is off the scale.
    """
    body = _after_thoughts(text.strip(), tolerant=tolerant)
    reply = _find_object(body, "score" if answers == 1 else "scores") if tolerant else _load(body)
    if not isinstance(reply, dict):
        raise ReplyError("it is not a JSON object")
    if answers == 1:
        return (_read_verdict(reply, scale),)
    return _read_numbered(reply.get("scores"), answers, scale)


def read_verdict_pairs(
    pairs: Any, answers: int, scale: tuple[float, float]
) -> tuple[Verdict, ...] | None:
    """Verdicts that were written down as lists; None where they are not what was written."""
    if not isinstance(pairs, list) or len(pairs) != answers:
        return None
    try:
        return tuple(
            Verdict(_check_score(score, scale), _shorten(reason)) for score, reason in pairs
        )
    except (ReplyError, TypeError, ValueError):
        return None


def _after_thoughts(text: str, *, tolerant: bool) -> str:
    """What follows the first `</think>` of a reply that begins with thoughts.

    Later ones may be quotations of the answer, which must not pass for the verdict. Some templates
    open the thoughts before the reply; such a reply to a strict request does not begin as JSON.
    """
    if text.startswith("<think>") or not (tolerant or text.startswith("{")):
        _, closed, rest = text.partition("</think>")
        return rest.strip() if closed else text
    return text


def _schema(answers: int) -> dict[str, Any]:
    # The reason comes first, so that the score follows from it.
    verdict = {"reason": {"type": "string"}, "score": {"type": "number"}}
    if answers == 1:
        return _object(verdict)
    numbered = _object({"answer": {"type": "integer"}, **verdict})
    return _object({"scores": {"type": "array", "items": numbered}})


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _read_numbered(entries: Any, answers: int, scale: tuple[float, float]) -> tuple[Verdict, ...]:
    if not isinstance(entries, list):
        raise ReplyError("it has no list `scores`")
    verdicts: dict[int, Verdict] = {}
    for entry in entries:
        number = entry.get("answer") if isinstance(entry, dict) else None
        if isinstance(number, bool) or not isinstance(number, int) or number in verdicts:
            raise ReplyError("an entry of `scores` has no `answer` number of its own")
        verdicts[number] = _read_verdict(entry, scale)
    if set(verdicts) != set(range(1, answers + 1)):
        raise ReplyError(f"`scores` should hold the answers 1 to {answers}, once each")
    return tuple(verdicts[number] for number in range(1, answers + 1))


def _read_verdict(entry: dict[str, Any], scale: tuple[float, float]) -> Verdict:
    if "score" not in entry:
        raise ReplyError("it has no `score`")
    return Verdict(_check_score(entry["score"], scale), _shorten(entry.get("reason")))


def _check_score(score: Any, scale: tuple[float, float]) -> float:
    if isinstance(score, bool) or not isinstance(score, int | float):
        raise ReplyError(f"`score` should be a number, not {score!r:.40}")
    # Compared before it becomes a float, which a whole number may be too large for.
    if not scale[0] <= score <= scale[1] or not math.isfinite(score):
        raise ReplyError(f"`score` {score!r:.40} is not from {scale[0]:.12g} to {scale[1]:.12g}")
    return float(score)


def _shorten(reason: Any) -> str:
    text = " ".join(reason.split()) if isinstance(reason, str) else ""
    return text if len(text) <= REASON_LENGTH else f"{text[: REASON_LENGTH - 1]}…"


def _load(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise ReplyError(f"it is not JSON ({str(error)[:80]})") from None


def _find_object(text: str, key: str) -> Any:
    """The one object with `key` in a text; raises `ReplyError` where several differ."""
    found = [each for each in _objects(text) if key in each]
    if not found:
        raise ReplyError(f"it holds no JSON object with `{key}`")
    if any(each != found[0] for each in found):
        raise ReplyError(f"it holds several JSON objects with `{key}`")
    return found[0]


def _objects(text: str) -> Iterator[dict[str, Any]]:
    decoder = json.JSONDecoder(parse_constant=_refuse_constant, object_pairs_hook=_unique)
    position = text.find("{")
    for _ in range(_MANY_OBJECTS):
        if position < 0:
            return
        try:
            value, end = decoder.raw_decode(text, position)
        except (ValueError, RecursionError):
            end = position + 1
        else:
            yield value
        position = text.find("{", end)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object; one that has a key twice says two things at once."""
    if len({key for key, _ in pairs}) < len(pairs):
        raise ValueError("a key stands twice in an object")
    return dict(pairs)
