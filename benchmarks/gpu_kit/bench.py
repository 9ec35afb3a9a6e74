"""Models of Qwen2.5's shapes with random weights, completions to learn from, and the memory they should take."""

import random
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Qwen2Config

from grpo_cli.probing.counting import ModelShape, read_shape
from grpo_cli.probing.memory import MemoryInputs, estimate_memory
from grpo_cli.recipe.model import ModelConfig
from tests.tiny_models import make_tiny_tokenizer

Row = dict[str, Any]
_SHAPES = {
    "0.5B": (896, 4864, 24, 14, 2, 151936),
    "1.5B": (1536, 8960, 28, 12, 2, 151936),
    "7B": (3584, 18944, 28, 28, 4, 152064),
}
"""Width, width of the MLP, layers, heads, key heads and vocabulary. Source: the models' `config.json`."""
_TINY = (64, 128, 2, 4, 2, 512)
LORA = {"r": 16, "lora_alpha": 32, "target_modules": "all-linear"}


@dataclass(frozen=True)
class Bench:
    """What holds for all parts."""

    folder: Path
    tiny: bool
    """Whether every model, batch and length is small enough for a CPU."""
    ends_at: float
    """When no further measurement should begin, as `time.monotonic()` counts."""

    @cached_property
    def device(self) -> str:
        return "cuda" if torch.cuda.is_available() else "cpu"

    @cached_property
    def tokenizer(self) -> Any:
        return make_tiny_tokenizer()

    def has_time(self) -> bool:
        return time.monotonic() < self.ends_at

    def size(self, number: int) -> int:
        """Return a number of tokens or rows, on a CPU a small one."""
        return max(number // 64, 8) if self.tiny else number

    def config(self, name: str) -> Qwen2Config:
        width, mlp, layers, heads, key_heads, vocabulary = _TINY if self.tiny else _SHAPES[name]
        return Qwen2Config(
            hidden_size=width,
            intermediate_size=mlp,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=key_heads,
            vocab_size=vocabulary,
            tie_word_embeddings=name != "7B",
            rope_parameters={"rope_type": "default", "rope_theta": 1e6},
            eos_token_id=self.tokenizer.eos_token_id,
            pad_token_id=self.tokenizer.pad_token_id,
        )

    def make_model(self, name: str, dtype: torch.dtype, *, lora: bool = False) -> Any:
        """Return the same weights at each call, on the device."""
        torch.manual_seed(0)
        with torch.device(self.device):
            config, options = self.config(name), {"dtype": dtype, "attn_implementation": "sdpa"}
            model = AutoModelForCausalLM.from_config(config, **options)
            return get_peft_model(model, LoraConfig(**LORA)) if lora else model

    def now(self) -> float:
        """Return the time in seconds once the device has done everything."""
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def reset_peak(self) -> None:
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()

    def peak_gib(self) -> float | None:
        """Return the most memory of tensors since `reset_peak`; None on a CPU."""
        return torch.cuda.max_memory_allocated() / 2**30 if self.device == "cuda" else None


@contextmanager
def noted(row: Row, what: str) -> Iterator[None]:
    """Go on with the next measurement if one fails, and say so in its row."""
    try:
        yield
    except Exception as error:  # whatever a device or a library of another version refuses
        text = str(error).strip().partition("\n")[0][:80]
        row["note"] = f"{what}: {type(error).__name__}: {text}"
        traceback.print_exc()


@dataclass(frozen=True)
class Batch:
    """Two groups of random completions, the same in every step and system."""

    prompt_tokens: int
    lengths: tuple[int, ...]
    group: int = 4

    @classmethod
    def mixed(cls, bench: Bench, longest: int) -> "Batch":
        """Return completions whose lengths spread evenly from a quarter of the longest to all of it."""
        most = bench.size(longest)
        return cls(bench.size(512), (*(most * (2 + number) // 8 for number in range(7)), most))

    @property
    def rows(self) -> int:
        return len(self.lengths)

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, list[Any]]:
        """Answer as TRL's `rollout_func`."""
        dice = random.Random(0)
        texts = [dice.choices(range(5, 200), k=self.prompt_tokens) for _ in self.lengths]
        return {
            "prompt_ids": [texts[row // self.group] for row in range(self.rows)],
            "completion_ids": [dice.choices(range(5, 200), k=each) for each in self.lengths],
            "logprobs": [[-1.0] * each for each in self.lengths],
        }


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Give each completion another value, so that every group has signal."""
    return [float(number) for number, _ in enumerate(completion_ids)]


@cache
def _read_shape(bench: Bench, name: str, dtype: str, lora: bool) -> ModelShape:
    cuda = bench.device == "cuda"
    with tempfile.TemporaryDirectory() as folder:
        bench.config(name).save_pretrained(folder)
        section = ModelConfig(path=folder, dtype=dtype, lora=LORA if lora else None)
        activations = "bfloat16" if cuda else None
        return read_shape(section, batch=2, length=256, activations=activations, cuda=cuda)


def estimate_gib(
    bench: Bench, name: str, batch: Batch, dtype: torch.dtype, *, lora: bool, shares: bool | None
) -> float:
    """Return the probe's estimate, without the CUDA context.

    Args:
        bench: Where it was measured.
        name: The model's.
        batch: What is sampled or learned from.
        dtype: Of the weights.
        lora: Whether adapters are trained.
        shares: Whether learning shares prompts; None for sampling.
    """
    shape = _read_shape(bench, name, str(dtype).removeprefix("torch."), lora)
    inputs = MemoryInputs(
        micro_batch=batch.rows,
        sampled=batch.rows,
        prompt_tokens=batch.prompt_tokens,
        completion_tokens=max(batch.lengths),
        group=batch.group if shares else None,
        autocast=bench.device == "cuda",
        cpu=bench.device == "cpu",
        adapters=lora,
        elsewhere=shares is not None,
    )
    found = estimate_memory(shape, inputs)
    if shares is not None:
        return found.peak_bytes / 2**30
    held = [part for part in found.parts if part.moment == "sampling" or part.name == "weights"]
    return sum(part.bytes for part in held) / 2**30
