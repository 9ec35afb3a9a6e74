"""The reward of a model: `model`, a sequence classifier that reads the conversation.

Owns the parameters, what can be told of a model's folder without loading it, and the way from a
logit to a score. Loading and running the model is `classifier.py`'s.
"""

import json
import math
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from grpo_cli.errors import RewardError, nearest
from grpo_cli.recipe.base import Integer
from grpo_cli.rewards.contract import Batch, RewardContext, RewardParams, Score, Scorer

if TYPE_CHECKING:
    from grpo_cli.rewards.classifier import Classifier, Encoded

Fault = tuple[str, str, str]
"""(parameter path, message, fix)."""

_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?", re.ASCII)
_HEAD = "ForSequenceClassification"
_AUTO_CLASS = f"AutoModel{_HEAD}"


class ModelParams(RewardParams):
    """Rewards what a reward model, a sequence classifier, makes of the conversation.

    Formula: the logit of the model at the last token of prompt and completion, or a function of
    it (`output`). Conversations are written with the reward model's own chat template; plain
    texts are joined, and get the special tokens its tokenizer adds (TRL adds none there). Text
    that is too long loses its beginning, so that the completion stays. The weights are frozen; in
    a training of several processes each holds a whole copy, and so do those that `timeout_s` starts.
    Range: any with `logit`, whose scale differs between models (`clip` bounds it); (0, 1) else.

    Source: `GRPOTrainer._calculate_rewards` (TRL 1.16), for a reward that is a model; Ouyang et
    al. 2022 (arXiv:2203.02155), section 3.5, the reward model r(x, y).
    """

    kind: ClassVar[str] = "model"
    costly: ClassVar[bool] = True

    path: str = Field(min_length=1)
    """A hub id, or a folder relative to the recipe; one that might be a hub id starts with `./`."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""
    input: Literal["conversation", "completion"] = "conversation"
    """What is read: prompt and completion, or the completion alone, as plain text."""
    label: Integer | str | None = None
    """Which label's logit is the reward, by number or by name; needed where there are several."""
    output: Literal["logit", "sigmoid", "softmax"] = "logit"
    """The score: the `logit` itself, its `sigmoid`, or the label's share of the `softmax` over
    all labels."""
    max_length: Integer | None = Field(default=None, ge=1)
    """Most tokens the model reads; where not given, as many as the model is made for."""
    batch_size: Integer = Field(default=8, ge=1)
    """Completions the model reads at once; changes speed and memory, not the scores."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Precision of the weights; `auto` is the checkpoint's own on a GPU, and float32 on the CPU."""
    device: str = "auto"
    """Where the model runs, such as `cpu` or `cuda:1`; `auto` is where the training runs."""
    trust_remote_code: bool = False
    """Whether to run Python code that comes with the model."""

    @field_validator("device")
    @classmethod
    def _check_device(cls, device: str) -> str:
        if not re.fullmatch(r"auto|cpu|mps|(cuda|xpu|npu|hpu)(:\d+)?", device):
            raise PydanticCustomError(
                "grpo_device",
                "should be auto, cpu, cuda or cuda:0, not {device}",
                {"device": device},
            )
        return device

    @property
    def is_local(self) -> bool:
        """Whether `path` names a folder (that need not exist), not a hub id."""
        return self.path.startswith((".", "/", "~")) or self.folder.exists()

    @property
    def folder(self) -> Path:
        """`path` as a folder."""
        return Path(self.path).expanduser()

    def problems(self) -> list[Fault]:
        """Reports a path that names no classifier, and a label it does not have."""
        if not self.is_local:
            return self._hub_problems()
        found = _find_folder_fault(self.folder, self.path)
        if found:
            return [found]
        config = _read_config(self.folder)
        if config is None:
            return [("path", f"{self.path}/config.json is not JSON", "fetch the model anew")]
        faults = self._head_problems(config)
        if self.revision is not None:
            faults.append(("revision", "a folder has no revisions", "remove `revision`"))
        return faults or self.label_problems(_read_labels(config))

    def _hub_problems(self) -> list[Fault]:
        if _HUB_ID.fullmatch(self.path):
            return []
        message = f"{self.path!r} is neither an existing folder nor a hub id"
        fix = "write a hub id such as `Skywork/Skywork-Reward-V2-Qwen3-0.6B`, or a folder's path"
        return [("path", message, fix)]

    def _head_problems(self, config: dict[str, Any]) -> list[Fault]:
        """What keeps `config.json` from being a classifier's."""
        if _AUTO_CLASS in (config.get("auto_map") or {}):
            message, fix = (
                "the model brings Python code of its own",
                "read that code, then set `trust_remote_code: true`",
            )
            return [] if self.trust_remote_code else [("trust_remote_code", message, fix)]
        architectures = [str(name) for name in config.get("architectures") or []]
        if not architectures or any(name.endswith(_HEAD) for name in architectures):
            return []
        message = (
            f"{self.path} holds a {architectures[0]}, which has no head that scores; "
            "one with random weights would take its place"
        )
        return [("path", message, f"name a reward model, whose architecture ends in {_HEAD}")]

    def label_problems(self, labels: Sequence[str]) -> list[Fault]:
        """What keeps `label` and `output` from fitting a model's labels, given in order."""
        if self.output == "softmax" and len(labels) == 1:
            fix = "output: sigmoid, or output: logit"
            return [("output", "the softmax over a single label is always 1", fix)]
        if self.label is None:
            if len(labels) <= 1:
                return []
            message = f"the model has {len(labels)} labels ({_enumerate(labels)}); none is chosen"
            return [("label", message, f"add `label` with a name, or 0 to {len(labels) - 1}")]
        if isinstance(self.label, int):
            if 0 <= self.label < len(labels):
                return []
            message = f"there is no label {self.label}; the model has {len(labels)}"
            return [("label", message, f"use 0 to {len(labels) - 1}, or a name")]
        if self.label in labels:
            return []
        close = nearest(self.label, labels)
        fix = f"label: {close}" if close else f"use one of {_enumerate(labels)}"
        return [("label", f"the model has no label {self.label!r}", fix)]

    def build(self, context: RewardContext) -> Scorer:
        """Loads the model and its tokenizer, from the hub where it is not here yet."""
        _refuse(self.problems())
        from grpo_cli.rewards.classifier import load_classifier

        classifier = load_classifier(self, context.device)
        _refuse(self.label_problems(classifier.labels))
        return partial(self._score, classifier)

    def _score(self, classifier: "Classifier", batch: Batch) -> list[Score | Exception]:
        encoded = [self._encode(classifier, batch, row) for row in range(len(batch.completions))]
        readable = [each.ids for each in encoded if not isinstance(each, Exception)]
        logits = iter(classifier.compute_logits(readable))
        return [
            each if isinstance(each, Exception) else self._rate(classifier, each, next(logits))
            for each in encoded
        ]

    def _rate(self, classifier: "Classifier", encoded: "Encoded", logits: list[float]) -> Score:
        index = self._find_index(classifier.labels)
        named = f"{classifier.labels[index]}: " if len(logits) > 1 else ""
        reason = f"{named}logit {logits[index]:.4g}{_cut_of(encoded)}"
        return Score(_transform(logits, index, self.output), reason)

    def _find_index(self, labels: Sequence[str]) -> int:
        return labels.index(self.label) if isinstance(self.label, str) else self.label or 0

    def _encode(self, classifier: "Classifier", batch: Batch, row: int) -> "Encoded | Exception":
        """What the model reads of a row, or what keeps it from being read."""
        try:
            if self.input == "completion" or isinstance(batch.prompts[row], str):
                prompt = "" if self.input == "completion" else batch.prompts[row]
                return classifier.encode_text(prompt + batch.texts[row])
            return classifier.encode_messages(_conversation(batch, row))
        except Exception as error:
            return error


def _conversation(batch: Batch, row: int) -> list[dict[str, Any]]:
    completion = batch.completions[row]
    if isinstance(completion, str):
        completion = [{"role": "assistant", "content": completion}]
    return [*batch.prompts[row], *completion]


def _transform(logits: Sequence[float], index: int, output: str) -> float:
    """The score of one row; written so that nothing overflows, and NaN stays NaN."""
    logit = logits[index]
    if output == "softmax":
        highest = max(logits)
        shares = [math.exp(each - highest) for each in logits]
        return shares[index] / sum(shares)
    if output == "sigmoid":
        small = math.exp(-abs(logit))
        return (small if logit < 0 else 1.0) / (1.0 + small)
    return logit


def _cut_of(encoded: "Encoded") -> str:
    kept, whole = len(encoded.ids), encoded.whole_length
    return f"; cut to the last {kept} of {whole} tokens" if kept < whole else ""


def _find_folder_fault(folder: Path, text: str) -> Fault | None:
    """What keeps a folder from being a model's; `text` is how the recipe wrote it."""
    if not folder.exists():
        siblings = folder.parent.iterdir() if folder.parent.is_dir() else ()
        close = nearest(folder.name, [each.name for each in siblings if each.is_dir()])
        fix = f"did you mean {close}?" if close else "name the folder of a reward model"
        return ("path", f"there is no folder {text}", fix)
    if not folder.is_dir():
        return ("path", f"{text} is a file", "name the folder that holds config.json")
    if (folder / "config.json").is_file():
        return None
    if (folder / "adapter_config.json").is_file():
        fix = "merge it into its base (peft: `merge_and_unload`), and name that folder"
        return ("path", f"{text} holds a LoRA adapter, not a whole model", fix)
    fix = "name the folder that holds config.json, the weights and the tokenizer"
    return ("path", f"{text} holds no config.json", fix)


def _read_config(folder: Path) -> dict[str, Any] | None:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return config if isinstance(config, dict) else None


def _read_labels(config: dict[str, Any]) -> list[str]:
    """The labels' names in order; transformers leaves them out where they are its two defaults."""
    names = config.get("id2label")
    if isinstance(names, dict) and all(str(key).isdecimal() for key in names):
        return [str(names[key]) for key in sorted(names, key=int)]
    count = config.get("num_labels")
    return [f"LABEL_{i}" for i in range(count if isinstance(count, int) else 2)]


def _enumerate(labels: Sequence[str], most: int = 8) -> str:
    more = f" and {len(labels) - most} more" if len(labels) > most else ""
    return ", ".join(labels[:most]) + more


def _refuse(faults: list[Fault]) -> None:
    for path, message, fix in faults:
        raise RewardError(f"{path}: {message}. Fix: {fix}")
