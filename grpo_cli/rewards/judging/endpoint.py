"""The way to the judge and back: requests, how many at once, and asking again.

Owns retries and what this endpoint was found not to understand. Wording is `prompts.py`'s, the
meaning of errors `refusals.py`'s; the loop it runs on is `background.py`'s.
"""

import asyncio
import logging
import random
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

from grpo_cli.errors import RewardError
from grpo_cli.rewards.judging import refusals
from grpo_cli.rewards.judging.prompts import Message, write_correction
from grpo_cli.rewards.judging.refusals import Access, RefusalError
from grpo_cli.rewards.judging.replies import (
    ReplyError,
    ReplyForm,
    Verdict,
    read_reply,
    response_format,
)

FIRST_DELAY_S = 0.5
"""Seconds before the first repetition; each next one waits twice as long."""
LONGEST_DELAY_S = 30.0

_WEAKER: dict[ReplyForm, ReplyForm] = {"json_schema": "json_object", "json_object": "text"}
_FORM_WORDS = ("response_format", "json_schema", "json_object", "structured output", "guided")
_UNKNOWN_FIELD = frozenset({400, 422})

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Sampling:
    """How the judge writes, and how patient we are with it."""

    reply: ReplyForm
    temperature: float | None
    max_tokens: int | None
    extra_body: dict[str, Any]
    max_concurrency: int
    max_retries: int
    request_timeout_s: float


@dataclass(frozen=True)
class Question:
    """One request, and what its reply must hold."""

    messages: tuple[Message, ...]
    answers: int
    """How many answers it shows."""
    scale: tuple[float, float]


Verdicts = tuple[Verdict, ...]


class Endpoint:
    """An OpenAI-compatible server and one of its models."""

    def __init__(self, access: Access, sampling: Sampling) -> None:
        """Sends nothing yet; imports openai."""
        import openai

        self._openai = openai
        self._access = access
        self._sampling = sampling
        self._form: ReplyForm = sampling.reply
        self._token_field = "max_tokens"
        self._temperature = sampling.temperature
        # Its own, so that training's random numbers stay what the seed makes them.
        self._random = random.Random()

    def connect(self) -> AbstractAsyncContextManager[Any]:
        """The client; to be made on the loop that uses it."""
        client: AbstractAsyncContextManager[Any] = self._openai.AsyncOpenAI(
            api_key=self._access.key,
            base_url=self._access.base_url,
            timeout=self._sampling.request_timeout_s,
            max_retries=0,  # Counted here, together with replies that cannot be used.
        )
        return client

    async def ask_all(
        self, client: Any, questions: Sequence[Question]
    ) -> list[Verdicts | RewardError]:
        """Asks every question, `max_concurrency` at once.

        Args:
            client: What `connect` made.
            questions: The requests.

        Returns:
            In the order of the questions, the verdicts or why there are none. After a failure
            that every question would meet, those not yet under way get it without being asked.
        """
        slots = asyncio.Semaphore(self._sampling.max_concurrency)
        broken: list[RefusalError] = []

        async def ask(question: Question) -> Verdicts | RewardError:
            async with slots:
                if broken:
                    return RewardError(str(broken[0]))
                try:
                    return await self._ask_patiently(client, question)
                except RefusalError as refusal:
                    if refusal.whole:
                        broken.append(refusal)
                    return RewardError(str(refusal))

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(ask(question)) for question in questions]
        return [task.result() for task in tasks]

    async def _ask_patiently(self, client: Any, question: Question) -> Verdicts:
        """Asks until there is a usable reply or no retry left; raises `RefusalError`."""
        messages = list(question.messages)
        retries = self._sampling.max_retries
        for attempt in range(retries + 1):
            try:
                return await self._ask_once(client, question, messages)
            except _UnusableReplyError as unusable:
                last = RefusalError(f"its reply cannot be used: {unusable}", again=True)
                messages = [*question.messages, *write_correction(unusable.reply, str(unusable))]
            except RefusalError as refusal:
                last = refusal
                if not refusal.again:
                    raise
                if attempt < retries:
                    await asyncio.sleep(self._delay_s(attempt, refusal.wait_s))
        raise RefusalError(
            f"the judge {self._access.model!r} gave no score in {retries + 1} requests; "
            f"the last time: {last}",
            whole=last.whole,
        )

    async def _ask_once(
        self, client: Any, question: Question, messages: Sequence[Message]
    ) -> Verdicts:
        completion, form = await self._send(client, question, messages)
        text = _text_of(completion)
        try:
            if text is None:
                raise ReplyError("it holds no text")
            return read_reply(text, question.answers, question.scale, tolerant=form == "text")
        except ReplyError as error:
            fault = self._access.clean(str(error))
            if _is_cut(completion):
                fault += f" (it was cut at max_tokens, {self._sampling.max_tokens})"
            raise _UnusableReplyError(fault, text or "") from None

    async def _send(
        self, client: Any, question: Question, messages: Sequence[Message]
    ) -> tuple[Any, ReplyForm]:
        """One reply and the form it was asked for in; what the endpoint does not know is left out."""
        while True:
            form, fields = self._form, self._fields(question)
            try:
                # The library's own limit starts anew with every chunk that arrives.
                async with asyncio.timeout(self._sampling.request_timeout_s):
                    reply = await client.chat.completions.create(
                        model=self._access.model, messages=list(messages), **fields
                    )
                return reply, form
            except self._openai.APIStatusError as error:
                if not self._adapt(error, fields, form):
                    raise await self._read_status(client, error) from None
            except (TimeoutError, self._openai.APITimeoutError):
                limit = self._sampling.request_timeout_s
                where = f"{self._access.base_url} sent no reply within {limit:g} s"
                raise RefusalError(f"{where} (request_timeout_s)", again=True) from None
            except self._openai.APIConnectionError as error:
                raise refusals.read_connection(error, self._access) from None
            except (self._openai.OpenAIError, ValueError) as error:
                words = self._access.clean(str(error))
                raise _UnusableReplyError(f"it is not a chat completion ({words})", "") from None

    def _fields(self, question: Question) -> dict[str, Any]:
        fields = {
            "temperature": self._temperature,
            self._token_field: self._sampling.max_tokens,
            "response_format": response_format(self._form, question.answers),
            "extra_body": self._sampling.extra_body,
        }
        return {name: value for name, value in fields.items() if value not in (None, {})}

    def _adapt(self, error: Any, fields: dict[str, Any], form: ReplyForm) -> bool:
        """Leaves out or weakens what the endpoint refused; whether there was such a thing."""
        if error.status_code not in _UNKNOWN_FIELD:
            return False
        words = f"{getattr(error, 'param', None) or ''} {refusals.words_of(error)}".lower()
        if form in _WEAKER and any(word in words for word in _FORM_WORDS):
            if self._form == form:
                self._form = _WEAKER[form]
                self._note(f"does not know response_format {form}; asks for {self._form} instead")
            return True
        if "max_completion_tokens" in words and "max_tokens" in fields:
            # OpenAI's reasoning models know the limit by this name only.
            self._token_field = "max_completion_tokens"
            return True
        if "temperature" in words and "temperature" in fields:
            if self._temperature is not None:
                self._temperature = None
                self._note("does not take a temperature; its own is used")
            return True
        return False

    def _note(self, what: str) -> None:
        _log.warning("judge: %s at %s %s", self._access.model, self._access.base_url, what)

    async def _read_status(self, client: Any, error: Any) -> RefusalError:
        if error.status_code != 404:
            return refusals.read_status(error, self._access)
        return refusals.read_not_found(error, self._access, await self._list_models(client))

    async def _list_models(self, client: Any) -> list[str] | None:
        try:
            async with asyncio.timeout(self._sampling.request_timeout_s):
                page = await client.models.list()
            return [str(model.id) for model in page.data]
        except Exception:
            # Whatever keeps the list away, the 404 is what there is to report.
            return None

    def _delay_s(self, attempt: int, wait_s: float | None) -> float:
        """Seconds until the next attempt; scattered, so that refused requests do not return as one."""
        delay_s = min(FIRST_DELAY_S * 2.0**attempt, LONGEST_DELAY_S)
        if wait_s is not None:
            return wait_s + self._random.uniform(0, FIRST_DELAY_S)
        return delay_s * self._random.uniform(0.5, 1.0)


class _UnusableReplyError(Exception):
    """A reply without verdicts; the text says what is wrong with it."""

    def __init__(self, fault: str, reply: str) -> None:
        super().__init__(fault)
        self.reply = reply


def _choice_of(completion: Any) -> Any:
    """The only choice; None where the server sent something else than a chat completion."""
    choices = getattr(completion, "choices", None)
    return choices[0] if isinstance(choices, list) and choices else None


def _text_of(completion: Any) -> str | None:
    content = getattr(getattr(_choice_of(completion), "message", None), "content", None)
    return content if isinstance(content, str) and content.strip() else None


def _is_cut(completion: Any) -> bool:
    return getattr(_choice_of(completion), "finish_reason", None) == "length"
