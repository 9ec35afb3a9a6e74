"""A teacher on a vLLM server: its tokenizer compared with the model's, and its log-probabilities of given tokens.

Source: vLLM 0.31, `/v1/models`, `/detokenize`, and `prompt_logprobs` of `/v1/completions`.
"""

from typing import TYPE_CHECKING, Any

import httpx

from grpo_cli.endpoints import request
from grpo_cli.errors import RunError, SetupError

if TYPE_CHECKING:
    import torch

_TIMEOUT_S = 600.0
"""A server that others use too may take long to read a large batch."""
_MOST_REPLY_BYTES = 2**30
_RETRIES, _SHOWN = 5, 500


class TeacherServer:
    """A model that tells how likely given tokens are, at temperature 1; TRL takes it for its reference model.

    Args:
        address: Such as `http://10.0.0.2:8000`.

    Raises:
        SetupError: No vLLM server answers there.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        try:
            self.model = str(self._ask("GET", "/v1/models")["data"][0]["id"])
            """What the server calls its model."""
        except (RunError, LookupError, TypeError, ValueError) as error:
            raise SetupError(
                f"no vLLM server with the teacher answers at {address} ({error})",
                "start one with `vllm serve TEACHER`, or correct `teacher.base_url`",
            ) from error

    def check_tokenizer(self, tokenizer: Any) -> None:
        """Refuse a teacher to which a token id of the model is another token, with a `SetupError`."""
        ids = sorted(set(tokenizer.get_vocab().values()))
        try:
            answer = self._ask("POST", "/detokenize", {"model": self.model, "tokens": ids})
        except RunError:
            # An id that the server does not know.
            answer = {"prompt": None}
        if answer["prompt"] != tokenizer.decode(ids):
            raise SetupError(
                f"the teacher at {self.address}, {self.model}, has another tokenizer than the model, so it cannot "
                "tell how likely tokens are",
                "serve a teacher of the same family of models",
            )

    def read(
        self, input_ids: "torch.Tensor", attention_mask: "torch.Tensor", logits_to_keep: int
    ) -> "torch.Tensor":
        """Return the log-probabilities of the last tokens, `[rows, logits_to_keep] float32`; 0 at padding.

        Ids and mask are `[rows, tokens] int64`.

        Raises `RunError` if the server has gone, or refuses.
        """
        rows = [
            ids[kept].tolist() for ids, kept in zip(input_ids, attention_mask.bool(), strict=True)
        ]
        asked = {"model": self.model, "prompt": rows, "max_tokens": 1, "prompt_logprobs": 0}
        choices = self._ask("POST", "/v1/completions", asked)["choices"]
        wanted = attention_mask[:, -logits_to_keep:].bool()
        told = [
            [position[str(token)]["logprob"] for token, position in pairs[len(pairs) - count :]]
            for pairs, count in (
                (list(zip(ids, choice["prompt_logprobs"], strict=True)), count)
                for ids, choice, count in zip(rows, choices, wanted.sum(1).tolist(), strict=True)
            )
        ]
        values = input_ids.new_zeros(wanted.shape).float()
        values[wanted] = values.new_tensor([value for row in told for value in row])
        return values

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """Return a server's answer; raises `RunError` if there is none, or it is an error."""
        try:
            answer = request(
                method,
                self.address.rstrip("/") + path,
                limit_s=_TIMEOUT_S,
                most_bytes=_MOST_REPLY_BYTES,
                transport=httpx.AsyncHTTPTransport(retries=_RETRIES),
                json=body,
                # A proxy would not find addresses of this machine.
                trust_env=False,
            )
        except httpx.HTTPError as error:
            raise RunError(
                f"the teacher at {self.address} does not answer: {error or type(error).__name__}",
                "start it again, then go on with `--resume`",
            ) from error
        if answer.is_error:
            raise RunError(
                f"the teacher at {self.address} refuses with {answer.status_code}: {answer.text[:_SHOWN]}"
            )
        return answer.json()
