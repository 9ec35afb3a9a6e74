"""What is measured: each case is a few changes to the quickstart's recipe, and the figures that count."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Replay = Literal["lengths", "tokens"]


@dataclass(frozen=True)
class Figure:
    """One number of a run, and what its ratio (`grpo` to plain TRL) should reach."""

    key: str
    """Of `runs.Measured.figures`."""
    title: str
    unit: str
    goal: float | None = None
    more_is_better: bool = False


@dataclass(frozen=True)
class Case:
    """A training that both systems do."""

    name: str
    title: str
    figures: tuple[Figure, ...]
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Dotted keys of the recipe, for both systems."""
    ours: Mapping[str, Any] = field(default_factory=dict)
    """Dotted keys that plain TRL does not have."""
    reward: str = "right"
    """A function of `rewards.py`."""
    silent_share: float = 0.0
    """Share of the prompts whose completions all get the same reward."""
    replay: Replay | None = None
    """`lengths`: how long a completion becomes is drawn from one distribution in both systems; `tokens`:
    the same completions in both."""
    compares: Literal["weights", "accuracy"] | None = None
    """What is compared after the runs, besides their figures."""
    steps: int = 4
    rounds: int | None = None
    """Where it is not as often as the others."""
    needs: str | None = None
    """A package without which it is left out."""


STEP = Figure("step_s", "step", "s", 0.5)
LONGEST = 256
MEAN_LENGTH = 40
_GROUPS = {
    # Ten prompts a step in the order of the rows, so that each step has the stated share.
    "training.per_device_train_batch_size": 40,
    "generation.num_generations": 4,
    "training.shuffle_dataset": False,
}
_WHOLE = {"model.lora": None, "model.dtype": "float32"}


def _silent(share: float, goal: float) -> Case:
    return Case(
        f"c{share:.0%}".rstrip("%"),
        f"{share:.0%} of groups without signal",
        (Figure("step_s", "step", "s", goal),),
        changes=_GROUPS,
        reward="spread",
        silent_share=share,
    )


def _backend(name: str, needs: str | None = None) -> Case:
    return Case(
        f"e-{name}",
        f"tokens a second, {name}",
        (Figure("tokens_per_s", "sampled and learnt from", "tokens/s", None, True),),
        changes={"generation.backend": name, "generation.max_completion_length": 64},
        reward="spread",
        needs=needs,
    )


def _equal(optimizer: str, learning_rate: float) -> Case:
    return Case(
        f"i-{optimizer.partition('_')[0]}",
        f"weights after 5 steps, float32, {optimizer}",
        (),
        changes={
            **_WHOLE,
            "training.optim": optimizer,
            "training.learning_rate": learning_rate,
            "training.per_device_train_batch_size": 16,
        },
        reward="spread",
        replay="tokens",
        compares="weights",
        steps=5,
        rounds=1,
    )


CASES = (
    Case("a", "quickstart", (STEP,), steps=6),
    Case(
        "b",
        f"long-tailed lengths, mean {MEAN_LENGTH}, at most {LONGEST}",
        (
            Figure("step_s", "step", "s", 0.35),
            # Memory counts where completions are long.
            Figure("peak_gib", "peak memory", "GiB", 0.7),
        ),
        changes={"generation.max_completion_length": LONGEST},
        reward="spread",
        replay="lengths",
    ),
    _silent(0.0, 1.0),
    _silent(0.5, 0.6),
    _silent(0.9, 0.3),
    _backend("transformers"),
    _backend("transformers_continuous_batching"),
    _backend("vllm", needs="vllm"),
    Case(
        "f",
        "whole quickstart, from start to saved adapter",
        (Figure("total_s", "all of it", "s", 0.5),),
        compares="accuracy",
        steps=40,
        rounds=1,
    ),
    Case(
        "h",
        "quickstart, every optimization off",
        (Figure("step_s", "step", "s", 1.02),),
        ours={"training.fast": False},
    ),
    _equal("sgd", 0.1),
    _equal("adamw_torch", 1e-5),
)
_CONTINUOUS = "e-transformers_continuous_batching"
ON_CPU = tuple(case.name for case in CASES if case.name != _CONTINUOUS)
"""What `make bench` measures. Continuous batching on a CPU takes half the machine's memory for its cache, and
minutes for a step."""
