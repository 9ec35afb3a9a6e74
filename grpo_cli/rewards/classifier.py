"""A reward model at work: a sequence classifier loaded, and run on conversations or texts.

Owns tokens and logits. Which logit is the score, and what becomes of it, is `kinds/model.py`'s.
"""

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from transformers.integrations import deepspeed

from grpo_cli.errors import RewardError, SetupError
from grpo_cli.loading_errors import check_tokenizer, explain_loading, quiet_loading
from grpo_cli.rewards.kinds.model import ModelParams

_OFFLINE_FIX = (
    "download it beforehand with `hf download {path}`; for a folder beside the recipe, write "
    "`path: ./{path}`"
)
_FIXES = (
    (
        "Unrecognized configuration class",
        "name a model with a head for sequence classification",
        "path",
    ),
)
"""The messages of transformers (5.17) about these models alone."""
_UNLIMITED = 10**9
"""Tokenizers without a limit name one beyond this."""
_EFFICIENT_LOADING = "FSDP_CPU_RAM_EFFICIENT_LOADING"


class Encoded(NamedTuple):
    """A text as the model reads it."""

    ids: list[int]
    whole_length: int
    """Tokens before what is too long was cut off."""


@dataclass(frozen=True)
class Classifier:
    """A sequence classifier, frozen, on its device."""

    model: Any
    tokenizer: Any
    labels: tuple[str, ...]
    """Their names; a logit each."""
    max_length: int | None
    """Most tokens of a text; None where there is no limit."""
    batch_size: int

    def encode_text(self, text: str) -> Encoded:
        """A plain text, with the special tokens the tokenizer puts around it."""
        ids = self._tokenize(text, add_special_tokens=True)
        if self.max_length is None or len(ids) <= self.max_length:
            return self._fill(ids)
        # The tokenizer cuts, as it knows which of its special tokens must stay where.
        cut = self._tokenize(
            text, add_special_tokens=True, truncation=True, max_length=self.max_length
        )
        return Encoded(cut, len(ids))

    def encode_messages(self, messages: Sequence[dict[str, Any]]) -> Encoded:
        """A conversation in the model's chat template, which brings its own special tokens.

        Raises:
            RewardError: The tokenizer has no chat template.
        """
        if not self.tokenizer.chat_template:
            raise RewardError(
                "prompts are conversations, and the reward model has no chat template. Fix: "
                "input: completion, or name a reward model that is made for conversations"
            )
        text = self.tokenizer.apply_chat_template(list(messages), tokenize=False)
        ids = self._tokenize(text, add_special_tokens=False)
        if self.max_length is None or len(ids) <= self.max_length:
            return self._fill(ids)
        # A decoder has seen every text begin with this token, and leans on it.
        first = ids[:1] if ids[0] == self.tokenizer.bos_token_id and self.max_length > 1 else []
        return Encoded(first + ids[len(ids) - self.max_length + len(first) :], len(ids))

    def compute_logits(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Runs the model, on texts of like length together.

        Args:
            sequences: Token ids, at least one a text.

        Returns:
            The logits of each text, [texts][labels], in the order given.

        Raises:
            RewardError: The model gives something else than a logit a label.
        """
        # The longest first, so that memory that does not suffice shows at once.
        order = sorted(range(len(sequences)), key=lambda row: -len(sequences[row]))
        found: dict[int, list[float]] = {}
        for start in range(0, len(order), self.batch_size):
            rows = order[start : start + self.batch_size]
            logits = self._run([sequences[row] for row in rows])
            found.update(zip(rows, logits.tolist(), strict=True))
        return [found[row] for row in range(len(sequences))]

    @torch.inference_mode()
    def _run(self, sequences: Sequence[Sequence[int]]) -> torch.Tensor:
        """Logits of one batch, padded on the right: [texts, labels] float32, on the CPU."""
        width = max(len(ids) for ids in sequences)
        shape = (len(sequences), width)
        tokens = torch.full(shape, self.tokenizer.pad_token_id, dtype=torch.long)
        mask = torch.zeros(shape, dtype=torch.long)
        for row, ids in enumerate(sequences):
            tokens[row, : len(ids)] = torch.tensor(ids)
            mask[row, : len(ids)] = 1
        device = self.model.device
        logits = self.model(input_ids=tokens.to(device), attention_mask=mask.to(device)).logits
        if logits.shape != (len(sequences), len(self.labels)):
            raise RewardError(
                f"the model gives logits of shape {tuple(logits.shape)} for {len(sequences)} "
                f"texts and {len(self.labels)} labels. Fix: name one that gives a logit a label"
            )
        return logits.float().cpu()

    def _tokenize(self, text: str, **options: Any) -> list[int]:
        # `verbose` would warn of texts that are about to be cut.
        ids: list[int] = self.tokenizer(text, verbose=False, **options)["input_ids"]
        return ids

    def _fill(self, ids: list[int]) -> Encoded:
        """An empty text gets a token, as a model cannot read nothing."""
        return Encoded(ids or [self.tokenizer.pad_token_id], len(ids))


def load_classifier(params: ModelParams, default_device: str) -> Classifier:
    """Loads a reward model and its tokenizer; prints nothing.

    Args:
        params: What to load, and how to run it.
        default_device: Where it runs if `params.device` is `auto`, as torch names it.

    Raises:
        RewardError: It is no classifier, or not one that can score texts.
        SetupError: It cannot be had, or there is no such device; the text says how to mend that.
    """
    device = _find_device(default_device if params.device == "auto" else params.device)
    location = str(params.folder.absolute()) if params.is_local else params.path
    options = {
        "revision": params.revision or "main",
        "trust_remote_code": params.trust_remote_code,
        "local_files_only": params.is_local,
    }
    explained = explain_loading(
        params.path, section="", offline_fix=_OFFLINE_FIX, more_fixes=_FIXES
    )
    with quiet_loading(), explained:
        tokenizer = AutoTokenizer.from_pretrained(location, truncation_side="left", **options)
        with _whole():
            model, report = AutoModelForSequenceClassification.from_pretrained(
                location,
                dtype=_find_dtype(params.dtype, device),
                # Such weights are refused below, where the message can name them.
                ignore_mismatched_sizes=True,
                output_loading_info=True,
                **options,
            )
    _check_weights(params.path, report)
    check_tokenizer(tokenizer, params.path, section="")
    _set_padding(params.path, model, tokenizer)
    # The keys and values of a text that is read once are of no use.
    model.config.get_text_config().use_cache = False
    model.requires_grad_(False).eval().to(device)
    labels = model.config.id2label
    return Classifier(
        model,
        tokenizer,
        labels=tuple(labels[index] for index in sorted(labels)),
        max_length=_find_max_length(params.max_length, model, tokenizer),
        batch_size=params.batch_size,
    )


def _find_device(name: str) -> torch.device:
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        there = torch.cuda.device_count()
        raise SetupError(f"there is no device {name} (CUDA devices: {there}). Fix: device: cpu")
    return device


def _find_dtype(name: str, device: torch.device) -> Any:
    """The dtype to load with; bfloat16 on the CPU is slow, and rounds scores for no gain."""
    if name == "auto":
        return torch.float32 if device.type == "cpu" else "auto"
    return getattr(torch, name)


def _find_max_length(wanted: int | None, model: Any, tokenizer: Any) -> int | None:
    """Most tokens of a text: what the recipe wants, else what the model was made for.

    Raises:
        RewardError: The recipe wants more than that.
    """
    positions = _count_positions(model)
    if wanted is None:
        limits = [limit for limit in (positions, tokenizer.model_max_length) if limit]
        return min((limit for limit in limits if 0 < limit < _UNLIMITED), default=None)
    if positions and 0 < positions < wanted:
        raise RewardError(
            f"max_length: {wanted} is more than the {positions} tokens the model is made for. "
            f"Fix: max_length: {positions}"
        )
    return wanted


def _count_positions(model: Any) -> int | None:
    """Positions a text may take; None where the model names no limit."""
    named = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    for name, module in model.named_modules():
        padding = getattr(module, "padding_idx", None)
        if name.endswith("position_embeddings") and padding is not None:
            # RoBERTa and its kin count from behind the padding's own position.
            return int(module.num_embeddings) - padding - 1
    return named


def _check_weights(path: str, report: dict[str, Any]) -> None:
    """Refuses a model some of whose weights were not in its checkpoint: they are random."""
    absent = sorted({*report["missing_keys"], *(key for key, *_ in report["mismatched_keys"])})
    if absent:
        more = f" and {len(absent) - 3} more" if len(absent) > 3 else ""
        raise RewardError(
            f"{path} lacks weights of a sequence classifier ({', '.join(absent[:3])}{more}), "
            "which would be random. Fix: name a model that was trained to score"
        )


def _set_padding(path: str, model: Any, tokenizer: Any) -> None:
    """Agrees on the padding token, by which decoders find the last token of a text.

    Source: `GRPOTrainer.__init__` (TRL 1.16), `reward_processing_classes`.
    """
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            _explain_tokens(path, "has neither a padding nor an end-of-sequence token")
        tokenizer.pad_token = tokenizer.eos_token
    rows = model.get_input_embeddings().num_embeddings
    highest = max(len(tokenizer), tokenizer.pad_token_id + 1)
    if highest > rows:
        _explain_tokens(path, f"knows {highest} tokens, the model {rows}")
    model.config.get_text_config().pad_token_id = tokenizer.pad_token_id


def _explain_tokens(path: str, message: str) -> NoReturn:
    raise RewardError(
        f"the tokenizer of {path} {message}. Fix: use the tokenizer that belongs to these weights"
    )


@contextlib.contextmanager
def _whole() -> Iterator[None]:
    """Loads all weights in every process, also where the trained model is sharded.

    The trainer's settings are global. Under FSDP, transformers would fill the model with zeros in
    all processes but the first, expecting the weights to be sent later; under ZeRO-3 it would
    split every weight among them. Nobody prepares a reward model for either.

    Source: `PreTrainedModel._move_missing_keys_from_meta_to_device` and `get_init_context`
    (transformers 5.17).
    """
    efficient = os.environ.pop(_EFFICIENT_LOADING, None)
    reference = deepspeed._hf_deepspeed_config_weak_ref
    deepspeed.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        if efficient is not None:
            os.environ[_EFFICIENT_LOADING] = efficient
        config = reference() if reference is not None else None
        if config is not None:
            deepspeed.set_hf_deepspeed_config(config)
