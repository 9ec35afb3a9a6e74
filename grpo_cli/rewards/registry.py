"""The kinds of rewards by name. To add one: write its `RewardParams` and list the class here."""

from collections.abc import Mapping
from types import MappingProxyType

from grpo_cli.rewards.answers import MathParams
from grpo_cli.rewards.contract import RewardParams
from grpo_cli.rewards.form import RegexParams, ThinkFormatParams
from grpo_cli.rewards.gym import ReasoningGymParams
from grpo_cli.rewards.length import LengthParams
from grpo_cli.rewards.own import PythonParams

_CLASSES: tuple[type[RewardParams], ...] = (
    MathParams,
    ReasoningGymParams,
    RegexParams,
    ThinkFormatParams,
    LengthParams,
    PythonParams,
)

KINDS: Mapping[str, type[RewardParams]] = MappingProxyType({each.kind: each for each in _CLASSES})
"""Every kind a recipe can name, and the schema of its parameters."""
