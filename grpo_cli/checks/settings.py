"""Settings without effect, and texts that YAML reads otherwise."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence

from grpo_cli.data.sources import has_eval
from grpo_cli.issues import Issue, Level, Location
from grpo_cli.recipe.explanation import Path, dotted, split_path
from grpo_cli.recipe.generation import VllmConfig
from grpo_cli.recipe.launch import SHARED_WEIGHTS
from grpo_cli.recipe.recipe import Recipe
from grpo_cli.recipe.rewards import RewardConfig
from grpo_cli.recipe.yaml_tree import Node
from grpo_cli.rewards.contract import RewardParams
from grpo_cli.units import format_duration

_EVAL_ROWS = "give the dataset an eval split (`eval`, `eval_split`, `eval_rows` or `eval_fraction`)"

MOST_HELD_OUT = 0.5
"""Share of the prompts held out beyond which `eval_fraction` is taken for the share to train on."""
_PROMPTS = frozenset({"user", "system", "rubric", "chat_template"})
_PATTERNS = frozenset({"regex", "pattern"})
_LIMITS = re.compile(r"(?!launch\b).*(timeout_s|seconds_per_test)")
"""Paths of limits of what takes seconds: a completion, a call, a test."""
_LONG_S = 1000
_MILLISECONDS = 500
"""What such a limit is a multiple of if it is probably in milliseconds."""
_LATEX = re.compile(r"(?<!\\)(?:\\\\)*\\(boxed|begin|frac|text)(?![a-z])")
"""Commands of LaTeX whose backslash a regular expression reads with the letter after it."""
_HIDDEN = re.compile(r"#\S")
"""How a comment begins that may be text: after the sign of most others comes a space."""
_LINE_BREAK = re.compile(r"\\n(?![a-z])")
r"""Two characters that mean a line break in double quotes; not the beginning of `\neq`."""

_ESCAPED = re.compile(r"[\b\f]|\t(?=ext|imes|heta|frac)|\r(?=ight|ho)")
r"""What YAML makes of `\b`, of `\boxed`, `\frac` and `\text` in double quotes."""

_TO_DO = re.compile(r" *# TO DO: ([\w.]+): ")

_SIGNS = {"\b": r"\b", "\f": r"\f", "\t": r"\t", "\r": r"\r"}


def check_effects(recipe: Recipe, steps: int | None) -> Iterator[Issue]:
    """Find settings that have no effect, leave nothing to learn, or do the opposite of what is meant.

    Args:
        recipe: The recipe.
        steps: Optimizer steps of the training; None if they are not known.
    """
    generation = recipe.generation
    # Beside a teacher, rewards may merely measure.
    has_weight = recipe.teacher is not None or any(reward.weight for reward in recipe.rewards)
    if recipe.rewards and not has_weight:
        seen = "every reward has the weight 0, so nothing is learned"
        yield Issue(seen, "give at least one reward a weight", "rewards.0.weight")
    if recipe.setting("sync_ref_model") and not recipe.kl_weight:
        seen = "there is no reference model to synchronize: `training.beta` is 0"
        fix = "set `training.beta: 0.04` or the like, or remove `sync_ref_model`"
        yield Issue(seen, fix, "training.sync_ref_model")
    elif recipe.setting("sync_ref_model") and recipe.model.lora is not None:
        yield from _check_synced_adapter(recipe)
    # A resolved recipe holds the defaults too.
    is_set = generation.vllm != VllmConfig.model_construct()
    if recipe.is_sampled and generation.backend != "vllm" and is_set:
        seen = f"has no effect: completions are sampled by {generation.backend}"
        fix = "set `generation.backend: vllm`, or remove it"
        yield Issue(seen, fix, "generation.vllm", level="warning")
    yield from _check_optimization(recipe)
    yield from _check_compilation(recipe)
    metric = str(recipe.setting("metric_for_best_model") or "reward").removeprefix("eval_")
    of_reward = metric == "reward" or (metric.startswith("rewards/") and metric.endswith("/mean"))
    if recipe.setting("greater_is_better") is False and of_reward:
        seen = "the model with the lowest reward would count as the best"
        fix = "set it to true, or remove it"
        yield Issue(seen, fix, "training.greater_is_better", level="warning")
    yield from _check_measuring(recipe)
    for index, reward in enumerate(recipe.rewards):
        if (reward.model_extra or {}).get("mode") == "relative" and reward.timeout_s is not None:
            seen = "scores completions one by one, so `mode: relative` has no group to compare"
            fix = "remove it; `request_timeout_s` limits each request"
            yield Issue(seen, fix, f"rewards.{index}.timeout_s")
    if steps:
        yield from _check_beyond_the_end(recipe, steps)


def _check_synced_adapter(recipe: Recipe) -> Iterator[Issue]:
    """Find what keeps a copy of the adapter from following it as the reference."""
    path, strategy = "training.sync_ref_model", recipe.launch.strategy
    if recipe.model.adapter is not None and recipe.model.adapter.reference == "base":
        seen = "the reference is the model without adapters (`reference: base`), which has nothing to synchronize"
        yield Issue(seen, "remove it, or `reference` from `model.adapter`", path)
    if strategy in SHARED_WEIGHTS:
        seen = f"an adapter cannot be the reference with weights sharded by {strategy}"
        yield Issue(seen, "set `launch.strategy: ddp`, or remove it", path)


def check_repeated(
    rewards: Sequence[RewardConfig], valid: Mapping[int, RewardParams]
) -> Iterator[Issue]:
    """Find rewards whose score counts twice.

    Args:
        rewards: Of the recipe.
        valid: Parameters of those that are right, by index.
    """
    plain = [each.model_copy(update={"name": None}) for each in rewards]
    unsigned = [each.model_copy(update={"weight": abs(each.weight)}) for each in plain]
    for index, each in enumerate(plain):
        first = unsigned.index(unsigned[index])
        if rewards[first].weight == -each.weight != 0.0:
            seen = f"is the same as rewards.{first} with the weight {-each.weight:g}: they cancel each other out"
            yield Issue(seen, "remove one of them", f"rewards.{index}", level="warning")
        if (first := plain.index(each)) < index and rewards[index].weight:
            seen = f"is the same as rewards.{first}, so its score counts twice"
            fix = f"remove it, and set `weight: {2 * rewards[index].weight:g}` there if that is what you want"
            yield Issue(seen, fix, f"rewards.{index}", level="warning")
        nested = getattr(valid.get(index), "of", None)
        for other, entry in enumerate(rewards if nested is not None else ()):
            alike = valid.get(other) == nested and entry.condition == rewards[index].condition
            if alike and entry.weight:
                seen = f"judges answers as rewards.{other} does, so a right one counts twice"
                fix = f"remove rewards.{other}, or give it `weight: 0` to measure its accuracy only"
                yield Issue(seen, fix, f"rewards.{index}.of", level="warning")


def _check_measuring(recipe: Recipe) -> Iterator[Issue]:
    """Find a training that writes no metrics, or holds out what it should train on, or nothing."""
    limit = recipe.evaluation.limit
    # A resolved recipe holds the defaults too.
    is_default = limit == type(recipe.evaluation).model_fields["limit"].default
    if limit and not is_default and not has_eval(recipe.dataset):
        seen = "has no effect: the dataset has no evaluation rows"
        fix = f"{_EVAL_ROWS}, or remove it"
        yield Issue(seen, fix, "evaluation.limit", level="warning")
    if recipe.setting("logging_strategy") == "no":
        seen = "`no` writes no metrics: `stop_when`, `expect`, reports and `grpo diagnose` have none to look at"
        yield Issue(seen, "remove it", "logging.logging_strategy", level="warning")
    held_out = recipe.dataset.eval_fraction or 0
    if held_out > MOST_HELD_OUT:
        seen = (
            f"holds out {held_out:.0%} of the prompts, and trains on the other {1 - held_out:.0%}"
        )
        fix = f"set `eval_fraction: {1 - held_out:.2g}`"
        yield Issue(seen, fix, "dataset.eval_fraction", level="warning")


def _check_compilation(recipe: Recipe) -> Iterator[Issue]:
    """Find settings that compile the model although `torch_compile` is false.

    Source: transformers 5.24, `TrainingArguments.__post_init__`.
    """
    extras = recipe.training.extras
    for name in ("torch_compile_backend", "torch_compile_mode"):
        if extras.get("torch_compile") is False and extras.get(name) is not None:
            seen = "compiles the model although `torch_compile` is false"
            fix = "remove it, or set `training.torch_compile: true`"
            yield Issue(seen, fix, f"training.{name}")


def _check_optimization(recipe: Recipe) -> Iterator[Issue]:
    """Find a learning rate and a clipping bound with which completions teach nothing.

    Source: trl 1.16, `GRPOTrainer._compute_loss`, `torch.clamp(coef_1, max=self.args.delta)`.
    """
    if not recipe.training.learning_rate:
        seen, fix = "is 0, so the weights never change", "set it to 1e-6, or 1e-5 with LoRA"
        yield Issue(seen, fix, "training.learning_rate", level="warning")
    first, second = recipe.setting("adam_beta1"), recipe.setting("adam_beta2")
    if first > second:
        seen = f"{first:g} is above `adam_beta2` ({second:g}), the slower average"
        fix = f"if they are swapped, set `adam_beta1: {second:g}` and `adam_beta2: {first:g}`"
        yield Issue(seen, fix, "training.adam_beta1", level="warning")
    delta = recipe.setting("delta")
    high = recipe.setting("epsilon_high")
    low = recipe.setting("epsilon")
    bound = 1 + (low if high is None else high)
    if low >= 1 and recipe.setting("loss_type") != "cispo":
        seen = f"is the distance from a probability ratio of 1: with {low:g} nothing is clipped from below"
        fix = f"set it to {low - 1:.2g}" if 1 < low < 2 else "set it to 0.2"
        yield Issue(seen, fix, "training.epsilon", level="warning")
    if high is not None and high < low:
        seen = (
            f"{high:g} is below `epsilon` ({low:g}), which bounds the probability ratio from below"
        )
        fix = f"if they are swapped, set `epsilon: {high:g}` and `epsilon_high: {low:g}`"
        yield Issue(seen, fix, "training.epsilon_high", level="warning")
    if delta is not None and delta <= bound:
        seen = (
            f"{delta:g} is not above 1 + epsilon ({bound:g}): better completions whose probability ratio is above "
            f"{delta:g} get no gradient, and every ratio starts at 1"
        )
        level: Level = "error" if delta < 1 else "warning"
        yield Issue(seen, "set it to 4, say, or remove it", "training.delta", level=level)


def _check_beyond_the_end(recipe: Recipe, steps: int) -> Iterator[Issue]:
    training, saves = recipe.training, recipe.setting("save_strategy")
    # Both come after the last step too, wherever it falls (transformers 5.17, `DefaultFlowCallback`).
    for key, strategy, effect in (
        ("eval", training.eval_strategy, "evaluated"),
        ("save", saves, "saved"),
    ):
        name = f"{key}_steps"
        every = recipe.setting(name) or 0
        if strategy == "steps" and name in training.model_fields_set and every > steps:
            seen = f"{every:g} is after the last step of this training ({steps}); only the last step is {effect}"
            fix = f"set it to {max(steps // 4, 1)}, say"
            yield Issue(seen, fix, f"training.{name}", level="warning")
    delay = recipe.setting("eval_delay") or 0
    # Counted in the units of `eval_strategy`.
    length = {"steps": steps, "epoch": training.num_train_epochs}.get(training.eval_strategy, delay)
    if delay > length and (training.eval_strategy == "steps" or training.max_steps < 1):
        seen = f"{delay:g} is after the end of this training ({length:g}), so nothing is evaluated"
        yield Issue(seen, "lower it, or remove it", "training.eval_delay", level="warning")
    every = recipe.setting("eval_steps") or 0
    every = math.ceil(every * steps) if every < 1 else every
    stopping, evaluations = training.early_stopping, math.ceil(steps / every) if every else 0
    if stopping and training.eval_strategy == "steps" and 0 < evaluations <= stopping.patience:
        seen = (
            f"{stopping.patience} is never reached: there are {evaluations} evaluations, and the first is the "
            "best so far whatever it gives"
        )
        fix = "set a smaller `training.eval_steps`, to evaluate more often"
        if evaluations > 2:
            fix = f"set it to {evaluations - 2} or less, or {fix}"
        yield Issue(seen, fix, "training.early_stopping.patience", level="warning")
    warmup = recipe.setting("warmup_steps") or 0
    if warmup >= steps:
        seen = (
            f"{warmup:g} warm-up steps of {steps} in all: the learning rate never reaches its value"
        )
        fix = f"set `warmup_steps: {max(steps // 10, 1)}`, or a fraction of the steps such as 0.1"
        yield Issue(seen, fix, "training.warmup_steps", level="warning")


def check_to_do(tree: Node, text: str) -> Iterator[Issue]:
    """Find lines of `grpo convert` that say what a person has to write, and keys that are not written yet."""
    for number, line in enumerate(text.splitlines(), 1):
        if (left := _TO_DO.match(line)) and tree.find(split_path(left[1])) is None:
            seen = (
                "is still to be written, as the comment `TO DO` says: training would run without it"
            )
            fix = "write it, or delete the comment"
            place = Location(tree.location.source, number, line.index("#") + 1)
            yield Issue(seen, fix, left[1], place)


def check_texts(node: Node, path: Path = ()) -> Iterator[Issue]:
    """Find texts that are cut by a comment, backslashes that are read otherwise, and milliseconds for seconds."""
    if isinstance(node.value, dict | list):
        entries = node.value.items() if isinstance(node.value, dict) else enumerate(node.value)
        for key, child in entries:
            yield from check_texts(child, (*path, key))
    elif isinstance(node.value, str) and path and path[-1] in _PROMPTS | _PATTERNS:
        yield from _check_text(node, path)
    elif isinstance(node.value, int | float) and _LIMITS.fullmatch(dotted(path)):
        is_round = node.value % _MILLISECONDS == 0
        if node.value >= _LONG_S and (is_round or path[0] == "rewards"):
            seen = f"{node.value:g} is in seconds, so it allows {format_duration(node.value)}"
            fix = f"if milliseconds are meant, set it to {node.value / 1000:g}"
            yield Issue(seen, fix, dotted(path), level="warning")


def _check_text(node: Node, path: Path) -> Iterator[Issue]:
    where, end = dotted(path), node.value[-30:]
    if _HIDDEN.match(node.comment):
        seen = f"` #` begins a comment, so the text ends with {end!r}, without {node.comment!r:.60}"
        yield Issue(seen, "put the whole text in quotes", where, level="warning")
    if path[-1] in _PROMPTS and node.style in (None, "'") and _LINE_BREAK.search(node.value):
        seen = r"holds a backslash and an n, which are a line break in double quotes alone"
        fix = "put the text in double quotes, or write it as a block (`|`)"
        yield Issue(seen, fix, where, level="warning")
    if found := _ESCAPED.search(node.value):
        sign = _SIGNS[found[0]]
        seen = f"{node.value!r:.60} holds a control character: in double quotes, YAML reads {sign} as one"
        fix = f"write the text in single quotes: '…{sign}…'"
        yield Issue(seen, fix, where, level="warning")
    if path[-1] in _PATTERNS and (command := _LATEX.search(node.value)):
        letter, name = command[1][0], command[1]
        seen = f"`\\{letter}` before `{name[1:]}` is a sign of regular expressions, so it never matches \\{name}"
        yield Issue(seen, f"write `\\\\{name}` (in single quotes)", where, level="warning")
