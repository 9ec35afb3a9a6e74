"""The reward that a language model gives: `judge`, through any OpenAI-compatible endpoint.

Owns the parameters and what can be checked without the network. Asking is `judging`'s.
"""

import importlib.util
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from grpo_cli.errors import RewardError, SetupError, install_extra
from grpo_cli.recipe.base import Integer, Number
from grpo_cli.rewards.contract import RewardContext, RewardParams, Scorer
from grpo_cli.rewards.judging.cache import VerdictCache, cache_folder
from grpo_cli.rewards.judging.prompts import Terms
from grpo_cli.rewards.judging.replies import ReplyForm

if TYPE_CHECKING:
    from grpo_cli.rewards.judging.refusals import Access

_OPENAI = "https://api.openai.com/v1"
_NO_KEY = "none"
"""What servers get that need no key; the library insists on one."""
_OURS = frozenset("model messages temperature max_tokens response_format stream n".split())
"""Fields of a request that parameters of ours set, or that change what comes back."""


class JudgeParams(RewardParams):
    """Rewards what a language model finds good, by criteria of yours.

    Formula: (score − lowest) / (highest − lowest), with the score the judge gives on `scale`. The
    judge sees the prompt, the completion and, where there is one, the reference answer; all of
    these are fenced, and it is told not to follow what stands in them. Identical completions of
    one prompt are judged once. A reply that is not the JSON asked for, or off the scale, is asked
    for again with what was wrong; after `max_retries` the completion has failed, and `on_error`
    decides. Requests have a limit of their own, `request_timeout_s`; with `timeout_s`, which scores
    completions one by one, there are no groups for `relative` to compare.
    Range: [0, 1].

    Source: grading of single answers by a model, and its position bias: Zheng et al. 2023,
    arXiv:2306.05685; chat completions of the OpenAI API (openai 3.54).
    """

    kind: ClassVar[str] = "judge"
    costly: ClassVar[bool] = True

    model: str = Field(min_length=1)
    """The judge's name at the endpoint."""
    rubric: str = Field(min_length=1)
    """The criteria: what a good answer is."""
    base_url: str | None = None
    """The endpoint, such as `http://localhost:8000/v1`; leave out for `$OPENAI_BASE_URL`, else OpenAI's own."""
    api_key_env: str = Field(default="OPENAI_API_KEY", pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")
    """Name of the environment variable with the key, which is sent to the endpoint and written nowhere.
    Servers at a `base_url` that need no key work without the variable."""
    scale: tuple[Number, Number] = (0.0, 10.0)
    """Lowest and highest score the judge may give; they become 0 and 1."""
    reference: str | None = None
    """Column with a reference answer that the judge is shown; rows where it is empty are judged without."""
    mode: Literal["absolute", "relative"] = "absolute"
    """`absolute` judges each completion alone. `relative` shows all completions of a prompt (rows of the
    same prompt and `row_id`) in one request, shuffled by a hash of their content, and gets a score for
    each. A group that is spread over processes is compared within each, and a completion that is alone,
    or the same as all others of its group, is judged as in `absolute`."""
    show_thinking: bool = False
    """Whether the judge sees all of a completion, not only what follows the last `</think>`."""
    temperature: Number | None = Field(default=0.0, ge=0, le=2)
    """The judge's sampling temperature; null for the endpoint's own."""
    max_tokens: Integer | None = Field(default=2048, ge=1)
    """Most tokens of a reply, a reasoning judge's thoughts included; null for the endpoint's own limit."""
    reply: ReplyForm = "json_schema"
    """How the reply's form is asked for (`response_format`). An endpoint that does not know it is asked for
    `json_object`, then for plain `text`, in which the JSON may stand among prose."""
    extra_body: dict[str, Any] = Field(default_factory=dict)
    """More fields of the request, such as `{reasoning_effort: low}`."""
    max_concurrency: Integer = Field(default=16, ge=1, le=1000)
    """Requests under way at once, in each process."""
    max_retries: Integer = Field(default=5, ge=0, le=100)
    """Repetitions of a request that was refused (429, 5xx), got no reply, or one that cannot be used. The
    pauses double from half a second; `Retry-After` is kept to."""
    request_timeout_s: Number = Field(default=60.0, gt=0)
    """Seconds until a request counts as unanswered."""
    cache: bool = True
    """Whether verdicts are kept on disk and used again for the same request, in later runs too; also
    where `temperature` would let them differ."""
    cache_dir: str | None = None
    """Folder of the verdicts, relative to the working directory; leave out for `judge` in `$GRPO_CACHE`,
    else in `~/.cache/grpo`."""

    @field_validator("base_url")
    @classmethod
    def _check_url(cls, url: str | None) -> str | None:
        fault = _url_fault(url) if url is not None else ""
        if fault:
            raise PydanticCustomError("grpo_judge_url", "{fault}", {"fault": fault})
        return url

    @field_validator("extra_body")
    @classmethod
    def _check_extra_body(cls, extra: dict[str, Any]) -> dict[str, Any]:
        taken = sorted(_OURS.intersection(extra))
        if taken:
            raise PydanticCustomError(
                "grpo_judge_extra", "should not hold {names}", {"names": ", ".join(taken)}
            )
        return extra

    @field_validator("scale")
    @classmethod
    def _check_scale(cls, scale: tuple[float, float]) -> tuple[float, float]:
        if scale[0] >= scale[1]:
            raise PydanticCustomError("grpo_judge_scale", "should be [lowest, highest]")
        return scale

    def required_columns(self) -> tuple[str, ...]:
        """The references' column, where there is one."""
        return (self.reference,) if self.reference else ()

    def problems(self) -> list[tuple[str, str, str]]:
        """Reports a missing library and a missing key; sends nothing."""
        found = []
        if importlib.util.find_spec("openai") is None:
            found.append(("kind", "openai is not installed", install_extra("judge")))
        try:
            self._read_access()
        except RewardError as error:
            message, _, fix = str(error).partition(". Fix: ")
            found.append(("api_key_env", message, fix))
        return found

    def waits(self, *, limited: bool) -> bool:
        """For the endpoint."""
        return True

    def build(self, context: RewardContext) -> Scorer:
        """Imports openai (about a second) and reads the key; connects to nothing yet."""
        try:
            import openai  # noqa: F401
        except ImportError as error:
            raise SetupError(
                f"openai cannot be imported: {error}. Fix: {install_extra('judge')}"
            ) from error
        from grpo_cli.rewards.judging.endpoint import Endpoint, Sampling
        from grpo_cli.rewards.judging.scorer import JudgeScorer, Showing

        access = self._read_access()
        sampling = Sampling(
            self.reply,
            self.temperature,
            self.max_tokens,
            self.extra_body,
            self.max_concurrency,
            self.max_retries,
            self.request_timeout_s,
        )
        asked = [self.reply, self.temperature, self.max_tokens, self.extra_body]
        return JudgeScorer(
            Terms(self.rubric, *self.scale),
            Showing(self.reference, self.show_thinking, self.mode == "relative"),
            Endpoint(access, sampling),
            [access.model, access.base_url, *asked],
            self._open_cache(),
        )

    def _open_cache(self) -> VerdictCache | None:
        if not self.cache:
            return None
        return VerdictCache(Path(self.cache_dir).expanduser() if self.cache_dir else cache_folder())

    def _read_access(self) -> "Access":
        """Address and key from the parameters and the environment; raises `RewardError`."""
        from grpo_cli.rewards.judging.refusals import Access

        url = self.base_url or os.environ.get("OPENAI_BASE_URL")
        fault = _url_fault(url) if url else ""
        if fault:
            raise RewardError(f"OPENAI_BASE_URL: {fault}. Fix: correct it, or set base_url")
        key = os.environ.get(self.api_key_env, "").strip()
        if not key and not url:
            raise RewardError(
                f"the environment variable {self.api_key_env} is not set. "
                f"Fix: export {self.api_key_env}=…, or set base_url to a server that needs no key"
            )
        if not (key.isascii() and key.isprintable()):
            raise RewardError(
                f"the environment variable {self.api_key_env} holds characters no key has. "
                f"Fix: export {self.api_key_env}=…"
            )
        return Access(self.model, url or _OPENAI, key or _NO_KEY, self.api_key_env, bool(key))


def _url_fault(url: str) -> str:
    """What keeps a text from being an endpoint's address; empty where it is one."""
    try:
        parts = urlsplit(url)
        host = parts.hostname
    except ValueError:
        return "should be an address such as http://localhost:8000/v1"
    if parts.scheme not in ("http", "https") or not host:
        return "should be an address such as http://localhost:8000/v1"
    if parts.username is not None or parts.password is not None:
        return "should hold no user or password; the key's place is the variable of api_key_env"
    return ""
