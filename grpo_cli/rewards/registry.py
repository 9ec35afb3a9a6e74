"""The kinds of rewards by name. To add one: write its `RewardParams` and list the class here."""

from collections.abc import Mapping
from types import MappingProxyType

from grpo_cli.rewards.contract import RewardParams
from grpo_cli.rewards.kinds.choice import ChoiceParams
from grpo_cli.rewards.kinds.code import CodeParams
from grpo_cli.rewards.kinds.form import RegexParams, ThinkFormatParams
from grpo_cli.rewards.kinds.gym import ReasoningGymParams
from grpo_cli.rewards.kinds.judge import JudgeParams
from grpo_cli.rewards.kinds.length import LengthParams
from grpo_cli.rewards.kinds.matching import ContainsParams, ExactParams
from grpo_cli.rewards.kinds.math import MathParams
from grpo_cli.rewards.kinds.model import ModelParams
from grpo_cli.rewards.kinds.overlong import CosineLengthParams, SoftOverlongParams
from grpo_cli.rewards.kinds.own import PythonParams
from grpo_cli.rewards.kinds.prose import LanguageParams, ReasoningStepsParams
from grpo_cli.rewards.kinds.repetition import RepetitionParams
from grpo_cli.rewards.kinds.structure import JsonParams
from grpo_cli.rewards.kinds.tags import AnswerFormatParams, TagCountParams

_CLASSES: tuple[type[RewardParams], ...] = (
    MathParams,
    ExactParams,
    ChoiceParams,
    ContainsParams,
    JsonParams,
    CodeParams,
    ReasoningGymParams,
    RegexParams,
    ThinkFormatParams,
    AnswerFormatParams,
    TagCountParams,
    ReasoningStepsParams,
    LanguageParams,
    LengthParams,
    CosineLengthParams,
    SoftOverlongParams,
    RepetitionParams,
    ModelParams,
    JudgeParams,
    PythonParams,
)

KINDS: Mapping[str, type[RewardParams]] = MappingProxyType({each.kind: each for each in _CLASSES})
"""Every kind a recipe can name, and the schema of its parameters."""
