"""The reward `model`: a sequence classifier that reads the conversation."""

import contextlib
import json
import math
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from pydantic import Field

from grpo_cli.errors import RewardError, SetupError, nearest
from grpo_cli.issues import Issue
from grpo_cli.recipe.base import Integer
from grpo_cli.rewards.contract import Batch, Meta, RewardContext, RewardParams, Score, Scorer

if TYPE_CHECKING:
    import torch

_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?", re.ASCII)
_HEAD = "ForSequenceClassification"
_OFFLINE_FIX = (
    "download it beforehand with `hf download {path}`; for a folder beside the recipe, write "
    "`path: ./{path}`"
)
_NO_HEAD = (
    "Unrecognized configuration class",
    "name a model with a head for sequence classification",
    "path",
)
"""A message of transformers (5.17) that only these models cause."""
_EFFICIENT_LOADING = "FSDP_CPU_RAM_EFFICIENT_LOADING"


class ModelParams(RewardParams):
    """Scores the conversation with a reward model (a sequence classifier).

    Formula: the model's logit at the last token of prompt and completion, or a function of it
    (`output`). Conversations are formatted with the reward model's own chat template; plain
    texts are concatenated, with the special tokens that its tokenizer adds (TRL adds none there).
    Text that is too long is truncated at the beginning, to keep the completion. The weights are
    frozen; each training process, and each process that `timeout_s` starts, loads a full copy.
    Range: any with `logit`, whose scale differs between models (`clip` limits it); otherwise (0, 1).

    Source: `GRPOTrainer._calculate_rewards` (TRL 1.16), for reward models; Ouyang et
    al. 2022 (arXiv:2203.02155), section 3.5, the reward model r(x, y).
    """

    kind = "model"
    meta = Meta(costly=True)

    path: str = Field(min_length=1)
    """A Hub id, or a folder relative to the recipe; start it with `./` if it could be a Hub id."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""
    input: Literal["conversation", "completion"] = "conversation"
    """The input: prompt and completion, or only the completion, as plain text."""
    label: Integer | str | None = None
    """Which label's logit is the reward, by number or by name; needed if there are several."""
    output: Literal["logit", "sigmoid", "softmax"] = "logit"
    """The score: the `logit` itself, its `sigmoid`, or the label's share of the `softmax` over
    all labels."""
    max_length: Integer | None = Field(default=None, ge=1)
    """Maximum number of input tokens; by default the model's own limit."""
    batch_size: Integer = Field(default=8, ge=1)
    """Completions per forward pass; affects speed and memory, not the scores."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Precision of the weights; `auto` is the checkpoint's own on a GPU, and float32 on the CPU."""
    device: str = Field(default="auto", pattern=r"^(auto|cpu|mps|(cuda|xpu|npu|hpu)(:\d+)?)$")
    """The model's device, such as `cpu` or `cuda:1`; `auto` is the training device."""
    trust_remote_code: bool = False
    """Whether to run Python code that ships with the model."""

    @property
    def is_local(self) -> bool:
        """True if `path` names a folder (that need not exist), not a hub id."""
        return self.path.startswith((".", "/", "~")) or self.folder.exists()

    @property
    def folder(self) -> Path:
        """`path` as a folder."""
        return Path(self.path).expanduser()

    def problems(self, context: RewardContext | None = None) -> list[Issue]:
        if not self.is_local:
            if _HUB_ID.fullmatch(self.path):
                return []
            message = f"{self.path!r} is neither an existing folder nor a hub id"
            fix = (
                "write a hub id such as `Skywork/Skywork-Reward-V2-Qwen3-0.6B`, or a folder's path"
            )
            return [Issue(message, fix, "path")]
        if fault := _folder_fault(self.folder, self.path):
            return [fault]
        try:
            config = json.loads((self.folder / "config.json").read_text(encoding="utf-8"))
            architectures = [str(name) for name in config.get("architectures") or []]
        except (OSError, ValueError, AttributeError, RecursionError):
            return [
                Issue(f"{self.path}/config.json is not JSON", "download the model again", "path")
            ]
        own_code = f"AutoModel{_HEAD}" in (config.get("auto_map") or {})
        if own_code and not self.trust_remote_code:
            message = "the model brings Python code of its own"
            fix = "read that code, then set `trust_remote_code: true`"
            return [Issue(message, fix, "trust_remote_code")]
        if architectures and not own_code and not architectures[0].endswith(_HEAD):
            message = (
                f"{self.path} holds a {architectures[0]}, which has no head that scores; "
                "one with random weights would take its place"
            )
            fix = f"name a reward model, whose architecture ends in {_HEAD}"
            return [Issue(message, fix, "path")]
        return self._label_problems(_read_labels(config))

    def _label_problems(self, labels: Sequence[str]) -> list[Issue]:
        if self.output == "softmax" and len(labels) == 1:
            fix = "output: sigmoid, or output: logit"
            return [Issue("the softmax over a single label is always 1", fix, "output")]
        if self.label in (*labels, *range(len(labels))) or (
            self.label is None and len(labels) == 1
        ):
            return []
        chosen = "none is chosen" if self.label is None else f"none is {self.label!r}"
        close = nearest(str(self.label), labels)
        fix = f"label: {close}" if close else f"use a name, or 0 to {len(labels) - 1}"
        message = f"the model has {len(labels)} labels ({', '.join(labels[:8])}); {chosen}"
        return [Issue(message, fix, "label")]

    def build(self, context: RewardContext) -> Scorer:
        classifier = _load_classifier(self, context.device)
        for issue in self._label_problems(classifier.labels):
            raise RewardError(issue.seen, issue.fix, issue.path)
        return partial(self._score, classifier)

    def _score(self, classifier: "_Classifier", batch: Batch) -> list[Score | Exception]:
        encoded = [self._encode(classifier, batch, row) for row in range(len(batch.completions))]
        readable = [each.ids for each in encoded if not isinstance(each, Exception)]
        logits = iter(classifier.compute_logits(readable, self.batch_size))
        return [
            each if isinstance(each, Exception) else self._rate(classifier, each, next(logits))
            for each in encoded
        ]

    def _encode(self, classifier: "_Classifier", batch: Batch, row: int) -> "_Encoded | Exception":
        prompt, completion = batch.prompts[row], batch.completions[row]
        try:
            if self.input == "completion":
                return classifier.encode(batch.texts[row], is_chat=False)
            if isinstance(prompt, str):
                return classifier.encode(prompt + batch.texts[row], is_chat=False)
            if not classifier.tokenizer.chat_template:
                raise RewardError(
                    "prompts are conversations, and the reward model has no chat template",
                    "input: completion, or name a reward model that is made for conversations",
                )
            if isinstance(completion, str):
                completion = [{"role": "assistant", "content": completion}]
            messages = [*prompt, *completion]
            text = classifier.tokenizer.apply_chat_template(messages, tokenize=False)
            return classifier.encode(text, is_chat=True)
        except Exception as error:
            return error

    def _rate(self, classifier: "_Classifier", encoded: "_Encoded", logits: list[float]) -> Score:
        label = self.label or 0
        index = classifier.labels.index(label) if isinstance(label, str) else label
        name = f"{classifier.labels[index]}: " if len(logits) > 1 else ""
        kept, whole = len(encoded.ids), encoded.whole_length
        cut = f"; cut to the last {kept} of {whole} tokens" if kept < whole else ""
        reason = f"{name}logit {logits[index]:.4g}{cut}"
        return Score(_transform(logits, index, self.output), reason)


def _transform(logits: Sequence[float], index: int, output: str) -> float:
    """Return the score of one row; written so that nothing overflows, and NaN stays NaN."""
    logit = logits[index]
    if output == "softmax":
        highest = max(logits)
        shares = [math.exp(each - highest) for each in logits]
        return shares[index] / sum(shares)
    if output == "sigmoid":
        small = math.exp(-abs(logit))
        return (small if logit < 0 else 1.0) / (1.0 + small)
    return logit


def _folder_fault(folder: Path, text: str) -> Issue | None:
    """Return why a folder is not a model's; `text` is how the recipe wrote it."""
    if not folder.exists():
        siblings = folder.parent.iterdir() if folder.parent.is_dir() else ()
        close = nearest(folder.name, [each.name for each in siblings if each.is_dir()])
        fix = f"did you mean {close}?" if close else "name the folder of a reward model"
        return Issue(f"there is no folder {text}", fix, "path")
    if (folder / "config.json").is_file():
        return None
    fix = "name the folder that holds config.json, the weights and the tokenizer"
    if (folder / "adapter_config.json").is_file():
        fix = (
            "merge the LoRA adapter into its base (peft: `merge_and_unload`), and name that folder"
        )
    return Issue(f"{text} holds no config.json", fix, "path")


def _read_labels(config: dict[str, Any]) -> list[str]:
    """Return the labels' names in order; transformers leaves them out if they are its two defaults."""
    names = config.get("id2label")
    if isinstance(names, dict) and all(str(key).isdecimal() for key in names):
        return [str(names[key]) for key in sorted(names, key=int)]
    count = config.get("num_labels")
    return [f"LABEL_{i}" for i in range(count if isinstance(count, int) else 2)]


class _Encoded(NamedTuple):
    """A text as the model reads it."""

    ids: list[int]
    whole_length: int
    """Tokens before truncation."""


@dataclass(frozen=True)
class _Classifier:
    """A sequence classifier, frozen, on its device."""

    model: Any
    tokenizer: Any
    labels: tuple[str, ...]
    """Their names, one per logit."""
    max_length: int | None
    """Most tokens of a text; None if there is no limit."""

    def encode(self, text: str, *, is_chat: bool) -> _Encoded:
        """Return a text's tokens; a chat template brings its own special tokens."""
        ids = self.tokenizer(text, add_special_tokens=not is_chat, verbose=False)["input_ids"]
        limit = self.max_length
        if limit is None or len(ids) <= limit:
            # An empty text gets a token, as a model cannot read nothing.
            return _Encoded(ids or [self.tokenizer.pad_token_id], len(ids))
        if not is_chat:
            # The tokenizer cuts, as it knows which of its special tokens must stay where.
            cut = self.tokenizer(text, truncation=True, max_length=limit, verbose=False)
            return _Encoded(cut["input_ids"], len(ids))
        # A decoder has seen every text begin with this token, and relies on it.
        first = ids[:1] if ids[0] == self.tokenizer.bos_token_id and limit > 1 else []
        return _Encoded(first + ids[len(ids) - limit + len(first) :], len(ids))

    def compute_logits(
        self, sequences: Sequence[Sequence[int]], batch_size: int
    ) -> list[list[float]]:
        """Return the logits of each text, [texts][labels], in the order given."""
        # Texts of like length together; the longest first, so that insufficient memory shows at once.
        order = sorted(range(len(sequences)), key=lambda row: -len(sequences[row]))
        results: dict[int, list[float]] = {}
        for start in range(0, len(order), batch_size):
            rows = order[start : start + batch_size]
            logits = self._run([sequences[row] for row in rows])
            results.update(zip(rows, logits.tolist(), strict=True))
        return [results[row] for row in range(len(sequences))]

    def _run(self, sequences: Sequence[Sequence[int]]) -> "torch.Tensor":
        """Return the logits of one batch, padded on the right: [texts, labels] float32, on the CPU."""
        import torch
        from torch.nn.utils.rnn import pad_sequence

        texts = [torch.tensor(ids, device=self.model.device) for ids in sequences]
        padding = self.tokenizer.pad_token_id
        tokens = pad_sequence(texts, batch_first=True, padding_value=padding)
        mask = pad_sequence([torch.ones_like(each) for each in texts], batch_first=True)
        with torch.inference_mode():
            logits = self.model(input_ids=tokens, attention_mask=mask).logits
        return logits.float().cpu()


def _load_classifier(params: ModelParams, default_device: str) -> _Classifier:
    """Load a reward model and its tokenizer, or raise what is wrong with them; prints nothing."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    from grpo_cli.templating import bounded_environment
    from grpo_cli.upstream.transformers import (
        check_tokenizer,
        explain_loading,
        quiet_loading,
        replace_sandbox,
    )

    replace_sandbox(bounded_environment())
    device = torch.device(default_device if params.device == "auto" else params.device)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise SetupError(f"there is no device {device} (CUDA devices: {count})", "device: cpu")
    # bfloat16 on the CPU is slow, and rounds scores for no gain.
    dtype = "float32" if params.dtype == "auto" and device.type == "cpu" else params.dtype
    location = str(params.folder.absolute()) if params.is_local else params.path
    options = {
        "revision": params.revision or "main",
        "trust_remote_code": params.trust_remote_code,
        "local_files_only": params.is_local,
    }
    explained = explain_loading(
        params.path, section="", offline_fix=_OFFLINE_FIX, more_fixes=[_NO_HEAD]
    )
    with quiet_loading(), explained:
        tokenizer = AutoTokenizer.from_pretrained(location, truncation_side="left", **options)
        with _unsharded():
            model, report = AutoModelForSequenceClassification.from_pretrained(
                location,
                dtype=dtype,
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
    names = model.config.id2label
    labels = tuple(names[index] for index in sorted(names))
    return _Classifier(model, tokenizer, labels, _find_max_length(params, model, tokenizer))


def _find_max_length(params: ModelParams, model: Any, tokenizer: Any) -> int | None:
    """Return the most tokens of a text: the recipe's, or else what the model was made for."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    for name, module in model.named_modules():
        padding = getattr(module, "padding_idx", None)
        if name.endswith("position_embeddings") and padding is not None:
            # RoBERTa and its kin count from behind the padding's own position.
            positions = int(module.num_embeddings) - padding - 1
    if params.max_length is None:
        # Tokenizers without a limit name a huge one.
        return min(filter(None, (positions, tokenizer.model_max_length)))
    if positions and positions < params.max_length:
        raise RewardError(
            f"max_length: {params.max_length} is more than the {positions} tokens the model is made for",
            f"max_length: {positions}",
        )
    return params.max_length


def _check_weights(path: str, report: dict[str, Any]) -> None:
    """Refuse a model with weights that were not in its checkpoint: they are random."""
    missing = sorted({*report["missing_keys"], *(key for key, *_ in report["mismatched_keys"])})
    if missing:
        raise RewardError(
            f"{path} lacks weights of a sequence classifier ({', '.join(missing[:3])}), which would be random",
            "name a model that was trained to score",
        )


def _set_padding(path: str, model: Any, tokenizer: Any) -> None:
    """Agree on the padding token, by which decoders find the last token of a text.

    Source: `GRPOTrainer.__init__` (TRL 1.16), `reward_processing_classes`.
    """
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    rows = model.get_input_embeddings().num_embeddings
    highest = max(len(tokenizer), tokenizer.pad_token_id + 1)
    if highest > rows:
        raise RewardError(
            f"the tokenizer of {path} knows {highest} tokens, the model {rows}",
            "use the tokenizer that belongs to these weights",
        )
    model.config.get_text_config().pad_token_id = tokenizer.pad_token_id


@contextlib.contextmanager
def _unsharded() -> Iterator[None]:
    """Load all weights in every process, even if FSDP or ZeRO-3 shards the trained model.

    Source: `PreTrainedModel._move_missing_keys_from_meta_to_device` and `get_init_context`
    (transformers 5.17).
    """
    from transformers.integrations import deepspeed

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
