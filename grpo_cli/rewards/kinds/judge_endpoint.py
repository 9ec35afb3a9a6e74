"""Requests to the judge at an OpenAI-compatible endpoint, and how its replies are read."""

import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from grpo_cli.errors import RewardError

if TYPE_CHECKING:
    from grpo_cli.rewards.kinds.judge import JudgeParams

ReplyForm = Literal["json_schema", "json_object", "text"]
Message = dict[str, Any]
"""One message of a chat request: `role` and `content`."""

REASON_LENGTH = 200
"""Characters kept of a justification."""
_FORMS: tuple[ReplyForm, ...] = ("json_schema", "json_object", "text")
"""From the strictest to what every endpoint knows."""
_FORM_WORDS = ("response_format", "json_schema", "json_object", "structured output", "guided")
_SHOWN = 300

_log = logging.getLogger(__name__)


class ReplyError(Exception):
    """A reply that cannot be used; the text says why."""


class Verdict(NamedTuple):
    """The judge's score of one answer, on the judge's scale."""

    score: float
    reason: str


@dataclass(frozen=True)
class Question:
    """One request, and what its reply must hold."""

    messages: tuple[Message, ...]
    answers: int
    """How many answers it shows."""
    scale: tuple[float, float]
    """Lowest and highest score."""


def response_format(form: ReplyForm, answers: int) -> dict[str, Any] | None:
    """Return the request's `response_format`; None for plain text."""
    if form == "text":
        return None
    if form == "json_object":
        return {"type": "json_object"}
    # The reason comes first, so that the score follows from it.
    verdict = {"reason": {"type": "string"}, "score": {"type": "number"}}
    schema = _object_schema(verdict)
    if answers > 1:
        numbered = _object_schema({"answer": {"type": "integer"}, **verdict})
        schema = _object_schema({"scores": {"type": "array", "items": numbered}})
    return {
        "type": "json_schema",
        "json_schema": {"name": "verdict", "strict": True, "schema": schema},
    }


def _object_schema(properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def read_reply(text: str, question: Question) -> list[Verdict]:
    """Return the verdicts of a reply, in the order of the answers.

    The JSON may stand in a code fence or among prose. Several objects that differ are refused: one
    may be a quotation of the answer.

    Raises:
        ReplyError: The reply is not of the shape asked for, or a score is off the scale.
    """
    if not text:
        raise ReplyError("it holds no text")
    if text.startswith("<think>"):
        # Only up to the first: later ones may be quotations of the answer.
        text = text.partition("</think>")[2]
    key = "score" if question.answers == 1 else "scores"
    objects = [each for each in _read_objects(text) if key in each]
    if not objects:
        raise ReplyError(f"it holds no JSON object with `{key}`")
    if any(each != objects[0] for each in objects):
        raise ReplyError(f"it holds several JSON objects with `{key}`")
    if question.answers == 1:
        return [_read_verdict(objects[0], question.scale)]
    try:
        scored = {
            each["answer"]: _read_verdict(each, question.scale) for each in objects[0]["scores"]
        }
    except (TypeError, LookupError):
        scored = {}
    numbers = range(1, question.answers + 1)
    if scored.keys() != set(numbers) or len(objects[0]["scores"]) > question.answers:
        raise ReplyError(f"`scores` should hold the answers 1 to {question.answers}, once each")
    return [scored[number] for number in numbers]


def _read_objects(text: str) -> Iterator[dict[str, Any]]:
    decoder = json.JSONDecoder()
    position = text.find("{")
    while position >= 0:
        try:
            value, end = decoder.raw_decode(text, position)
            yield value
        except (ValueError, RecursionError):
            end = position + 1
        position = text.find("{", end)


def _read_verdict(entry: dict[str, Any], scale: tuple[float, float]) -> Verdict:
    score = entry.get("score")
    if isinstance(score, bool) or not isinstance(score, int | float):
        raise ReplyError(f"`score` should be a number, not {score!r:.40}")
    if not scale[0] <= score <= scale[1]:
        raise ReplyError(f"`score` {score!r:.40} is not from {scale[0]:.12g} to {scale[1]:.12g}")
    return Verdict(float(score), _one_line(str(entry.get("reason") or ""), REASON_LENGTH))


def _one_line(text: str, longest: int) -> str:
    line = " ".join(text.split())
    return line if len(line) <= longest else f"{line[: longest - 1]}…"


class _RefusalError(RewardError):
    """A request that got no reply; `all_requests` says whether every other request will end like it."""

    def __init__(self, seen: str, fix: str = "", *, all_requests: bool = False) -> None:
        super().__init__(seen, fix)
        self.all_requests = all_requests


class Endpoint:
    """A judge at an OpenAI-compatible server; the openai client repeats requests that are refused."""

    def __init__(self, params: "JudgeParams", base_url: str, key: str) -> None:
        """Connect to nothing yet; `key` is empty for servers that need none."""
        import openai

        self._params, self._openai = params, openai
        self._url, self._key = base_url, key
        self._form: ReplyForm = params.reply
        fields = {
            "temperature": params.temperature,
            "max_tokens": params.max_tokens,
            "extra_body": params.extra_body or None,
        }
        self._fields = {name: value for name, value in fields.items() if value is not None}

    def ask_all(self, questions: Sequence[Question]) -> list[list[Verdict] | RewardError]:
        """Ask every question, `max_concurrency` at once.

        Returns:
            In the order of the questions, the verdicts or why there are none. After a failure
            that every question would meet, those not yet under way get it without being asked.
        """
        from grpo_cli.endpoints import run_async

        verdicts: list[list[Verdict] | RewardError] = run_async(self._ask_all(questions))
        return verdicts

    async def _ask_all(self, questions: Sequence[Question]) -> list[list[Verdict] | RewardError]:
        import asyncio

        from grpo_cli.endpoints import BoundedClient

        limit_s = self._params.request_timeout_s
        slots = asyncio.Semaphore(self._params.max_concurrency)
        fatal: list[_RefusalError] = []

        async def ask(client: Any, question: Question) -> list[Verdict] | RewardError:
            async with slots:
                if fatal:
                    return fatal[0]
                try:
                    return await self._ask(client, question)
                except _RefusalError as refusal:
                    if refusal.all_requests:
                        fatal.append(refusal)
                    return refusal

        async with self._openai.AsyncOpenAI(
            # The client insists on a key.
            api_key=self._key or "none",
            base_url=self._url,
            timeout=limit_s,
            max_retries=self._params.max_retries,
            http_client=BoundedClient(limit_s),
        ) as client:
            return list(await asyncio.gather(*(ask(client, each) for each in questions)))

    async def _ask(self, client: Any, question: Question) -> list[Verdict]:
        """Ask until there is a usable reply or no retry left."""
        messages = question.messages
        requests = self._params.max_retries + 1
        fault = ""
        for _ in range(requests):
            text, cut = _read_completion(await self._send(client, messages, question.answers))
            try:
                return read_reply(text, question)
            except ReplyError as error:
                fault = self._clean(str(error))
            if cut:
                fault += f" (it was cut at max_tokens, {self._params.max_tokens})"
            correction = f"That reply cannot be used: {fault}. Reply again, with the JSON object and nothing else."
            previous = [{"role": "assistant", "content": text[:2000]}] if text else []
            messages = (*question.messages, *previous, {"role": "user", "content": correction})
        raise _RefusalError(
            f"the judge {self._params.model!r} gave no score in {requests} requests; the last time: "
            f"its reply cannot be used: {fault}"
        )

    async def _send(self, client: Any, messages: Sequence[Message], answers: int) -> Any:
        """Return the server's reply; drops from the request what the endpoint does not know."""
        while True:
            form, fields = self._form, dict(self._fields)
            if response := response_format(form, answers):
                fields["response_format"] = response
            try:
                return await client.chat.completions.create(
                    model=self._params.model, messages=list(messages), **fields
                )
            except self._openai.APIStatusError as error:
                if not self._adapt(error, fields, form):
                    raise self._explain_status(error) from None
            except self._openai.APIConnectionError as error:
                raise self._explain_connection(error) from None
            except (self._openai.OpenAIError, ValueError):
                return None  # Not a chat completion.

    def _adapt(self, error: Any, fields: dict[str, Any], form: ReplyForm) -> bool:
        """Drop or weaken what the endpoint refused; returns whether there was such a thing."""
        if error.status_code not in (400, 422):
            return False
        words = f"{getattr(error, 'param', None) or ''} {_message_of(error)}".lower()
        if form != "text" and any(word in words for word in _FORM_WORDS):
            # Another request may have weakened it meanwhile.
            if self._form == form:
                self._form = _FORMS[_FORMS.index(form) + 1]
                note = "judge: %s does not know response_format %s; asks for %s instead"
                _log.warning(note, self._params.model, form, self._form)
        elif "max_completion_tokens" in words and "max_tokens" in fields:
            # OpenAI's reasoning models know the limit by this name only.
            self._fields["max_completion_tokens"] = fields["max_tokens"]
            self._fields.pop("max_tokens", None)
        elif "temperature" in words and "temperature" in fields:
            if self._fields.pop("temperature", None) is not None:
                note = "judge: %s does not take a temperature; its own is used"
                _log.warning(note, self._params.model)
        else:
            return False
        return True

    def _explain_status(self, error: Any) -> _RefusalError:
        """Return what an error status means, after the client's retries."""
        code, variable = error.status_code, self._params.api_key_env
        message = self._clean(_message_of(error))
        answer = f"{self._url} answered {code}: {message}"
        if code == 404:
            fix = f"correct model ({self._params.model}), or base_url (it usually ends in /v1)"
            return _RefusalError(f"{answer}", fix, all_requests=True)
        if code in (401, 403):
            fix = f"export {variable}=… (the environment variable that api_key_env names)"
            if self._key:
                fix = f"put a key that is valid there into the environment variable {variable}"
            return _RefusalError(f"{answer}", fix, all_requests=True)
        if getattr(error, "code", None) == "insufficient_quota":
            return _RefusalError(f"{answer}", "add credit to the account", all_requests=True)
        if code in (408, 409, 429) or code >= 500:
            retries, model = self._params.max_retries, self._params.model
            answer = f"the judge {model!r} gave no score with {retries} retries; {answer}"
        return _RefusalError(answer)

    def _explain_connection(self, error: Any) -> _RefusalError:
        if isinstance(error, self._openai.APITimeoutError):
            limit = f"{self._params.request_timeout_s:g} s (request_timeout_s)"
            return _RefusalError(f"{self._url} sent no reply within {limit}")
        from grpo_cli.endpoints import ReplyTooLargeError

        cause = error.__cause__ or error
        words = self._clean(str(cause) or type(cause).__name__)
        if isinstance(cause, ReplyTooLargeError):
            return _RefusalError(f"{self._url}: {words}", "name an endpoint of chat completions")
        return _RefusalError(
            f"no server answers at {self._url} ({words})",
            "start the server, or correct base_url",
            all_requests=True,
        )

    def _clean(self, text: str) -> str:
        """Return a server's message on one line, shortened, without the key that some servers repeat."""
        return _one_line(text.replace(self._key, "***") if self._key else text, _SHOWN)


def _message_of(error: Any) -> str:
    body = error.body
    if isinstance(body, dict):
        body = body.get("message") or body.get("detail") or body.get("error") or body
    return str(body or error.response.text or error.message)


def _read_completion(completion: Any) -> tuple[str, bool]:
    """Return a reply's text, and whether it was cut; no text if it is not a chat completion."""
    try:
        choice = completion.choices[0]
        return str(choice.message.content or "").strip(), choice.finish_reason == "length"
    except (AttributeError, LookupError, TypeError):
        return "", False
