"""What an endpoint's errors mean: whether asking again helps, when, and what a person should mend.

Owns reading errors of the openai library into words, without the API key. Asks nothing itself.
"""

import email.utils
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from grpo_cli.errors import nearest

LONGEST_WAIT_S = 120.0
"""A server that asks for a longer pause than this is taken to refuse."""

_TOO_BUSY = frozenset({408, 409, 425, 429})
_SHOWN = 300
_SHOWN_MODELS = 12


@dataclass(frozen=True)
class Access:
    """Where the judge is and how to get in."""

    model: str
    base_url: str
    key: str
    key_variable: str
    key_given: bool
    """Whether the key came from the variable; else it is a dummy."""

    def clean(self, text: str) -> str:
        """A server's words on one line, shortened, without the key that some servers repeat."""
        line = " ".join(text.split())
        if self.key_given:
            line = line.replace(self.key, "***")
        return line if len(line) <= _SHOWN else f"{line[: _SHOWN - 1]}…"


class RefusalError(Exception):
    """A request that got no reply; the text says why."""

    def __init__(
        self, text: str, *, again: bool = False, whole: bool = False, wait_s: float | None = None
    ) -> None:
        """Says why.

        Args:
            text: What happened, with a fix where there is one.
            again: Whether the same request may succeed later.
            whole: Whether every other request will end like this one.
            wait_s: Seconds the server wants to be left alone.
        """
        super().__init__(text)
        self.again = again
        self.whole = whole
        self.wait_s = wait_s


def read_status(error: Any, access: Access) -> RefusalError:
    """What an error status (`openai.APIStatusError`) other than 404 means."""
    code = error.status_code
    words = access.clean(words_of(error))
    said = f"{access.base_url} answered {code}: {words}"
    if code in (401, 403):
        return RefusalError(f"{said}. Fix: {_key_fix(access)}", whole=True)
    if code in _TOO_BUSY or code >= 500:
        if getattr(error, "code", None) == "insufficient_quota":
            return RefusalError(f"{said}. Fix: add credit to the account", whole=True)
        wait_s = read_retry_after(error.response.headers)
        if wait_s is not None and wait_s > LONGEST_WAIT_S:
            return RefusalError(f"{said} (and asks to wait {wait_s:.0f} s)", whole=True)
        return RefusalError(said, again=True, wait_s=wait_s)
    return RefusalError(said)


def read_not_found(error: Any, access: Access, models: list[str] | None) -> RefusalError:
    """What a 404 means, given the models the server lists; None where it lists none."""
    words = access.clean(words_of(error))
    if models is None:
        fix = "correct base_url (it usually ends in /v1) or model"
        said = f"{access.base_url} answered 404 for model {access.model!r}: {words}"
        return RefusalError(f"{said}. Fix: {fix}", whole=True)
    if access.model in models:
        return RefusalError(
            f"{access.base_url} has {access.model!r} but answered 404: {words}", whole=True
        )
    shown = ", ".join(models[:_SHOWN_MODELS]) + (", …" if len(models) > _SHOWN_MODELS else "")
    close = nearest(access.model, models) or (models[0] if len(models) == 1 else None)
    fix = f"model: {close}" if close else "set model to one of them"
    said = (
        f"{access.base_url} has no model {access.model!r}; it has {access.clean(shown) or 'none'}"
    )
    return RefusalError(f"{said}. Fix: {fix}", whole=True)


def read_connection(error: BaseException, access: Access) -> RefusalError:
    """What a connection that failed (`openai.APIConnectionError`) means."""
    cause = error.__cause__ or error
    words = access.clean(str(cause) or type(cause).__name__)
    fix = "start the server, or correct base_url"
    return RefusalError(
        f"no server answers at {access.base_url} ({words}). Fix: {fix}", again=True, whole=True
    )


def words_of(error: Any) -> str:
    """The server's own words in an error status."""
    body = error.body
    if isinstance(body, dict):
        inner = body.get("error")
        body = body.get("message") or body.get("detail") or inner or body
    return str(body or error.response.text or error.message)


def read_retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds that `Retry-After` asks for, written as a number or as a date; None where it asks nothing.

    Source: RFC 9110, section 10.2.3; `retry-after-ms` is OpenAI's.
    """
    for name, factor in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        try:
            seconds = float(headers.get(name, "")) * factor
        except ValueError:
            continue
        if not math.isnan(seconds):
            return max(seconds, 0.0)
    try:
        moment = email.utils.parsedate_to_datetime(headers.get("retry-after", ""))
        return max(moment.timestamp() - time.time(), 0.0)
    except (TypeError, ValueError, OverflowError):
        return None


def _key_fix(access: Access) -> str:
    if access.key_given:
        return f"put a key that is valid there into the environment variable {access.key_variable}"
    return f"export {access.key_variable}=… (the environment variable that api_key_env names)"
