"""The cheap part of a probe: everything that needs no weights.

Owns what is loaded for it, once: tokenizer, data and rewards.
"""

import shutil
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from grpo_cli.analysis.samples import NO_TRAINER, score_samples
from grpo_cli.batch import plan_batch
from grpo_cli.checks.arithmetic import batch_inputs
from grpo_cli.checks.contents import reward_context
from grpo_cli.checks.reward_tests.procedure import try_rewards
from grpo_cli.checks.reward_tests.table import TooSlowError
from grpo_cli.checks.settings import read_setting
from grpo_cli.data.scored import GroupReport
from grpo_cli.issues import Finding, FindingLevel
from grpo_cli.machine import pick_device, read_hardware
from grpo_cli.models.source import check_model_data
from grpo_cli.probe import cost, prompts, risks
from grpo_cli.probe import resource_checks as resource_checks
from grpo_cli.probe.device import find_device
from grpo_cli.probe.memory import estimate_memory, memory_inputs
from grpo_cli.probe.session import ROWS, Session, spread
from grpo_cli.probe.signal_checks import CLIPPED, DEAD, WEAK
from grpo_cli.probe.upstream_settings import check_upstream_settings
from grpo_cli.rewards.building import build_rewards
from grpo_cli.rewards.contract import Batch, text_of
from grpo_cli.rewards.scoring import Reward, has_state, read_state

LONGEST = 8
"""Prompts with the most characters, which are looked at besides."""
QUICK_S = 10.0
"""Seconds that rewards may take in the quick probe, which every training waits for."""
_SHOWN_LENGTH = 10_000
"""Characters of a rendered prompt that are kept."""


def check_statically(session: Session, runs: Path, *, costly: bool) -> None:
    """Looks at settings, data, prompts, rewards, memory and disk.

    Args:
        session: Gets what was loaded and found.
        runs: Where run folders go.
        costly: Whether rewards whose scores cost seconds or money are tried on made-up answers.

    Raises:
        GrpoError: The tokenizer, the data or a reward cannot be loaded.
    """
    processes, gpus = session.checked.num_processes, read_hardware().gpus
    session.add(risks.find_risks(risks.Setting(session.recipe, processes, gpus)))
    cpu = pick_device(session.recipe.launch) == "cpu"
    session.add(check_upstream_settings(session.recipe, cpu=cpu))
    _load_data(session)
    _look_at_prompts(session)
    if session.recipe.is_sampled:
        _try_rewards(session, costly=costly)
    else:
        session.add(_judge_groups(session.data.report.groups))
        session.add(_judge_responses(session))
    _estimate(session, runs)


def _load_data(session: Session) -> None:
    from grpo_cli.data.build import build_datasets
    from grpo_cli.models.loading import check_weights, load_config, load_tokenizer

    session.tell("loading the tokenizer")
    # First, as these errors are clearer than those of the tokenizer.
    check_model_data(session.recipe.model)
    load_config(session.recipe.model)
    session.tokenizer = load_tokenizer(session.recipe.model)
    session.tell("comparing the weights with config.json")
    check_weights(session.recipe.model, session.tokenizer)
    session.tell("loading the data")
    session.data = build_datasets(
        session.recipe,
        has_chat_template=bool(session.tokenizer.chat_template),
        count_tokens=None,
    )
    report = session.data.report
    session.add(_check_splits(report.exact_duplicates_between_splits, report.eval_rows or 0))


def _check_splits(repeated: int, held: int) -> Iterable[Finding]:
    """Evaluation rows that are also trained on."""
    if not repeated:
        return
    yield Finding(
        "data: evaluation on training rows",
        "error" if repeated == held else "warning",
        f"{repeated} of {held} evaluation prompts are training prompts too, word for word",
        "take another split for evaluation, or hold rows out with `dataset.eval_fraction: 0.05`",
        "a gain on them shows memory, not learning",
        "dataset",
    )


def _judge_groups(groups: GroupReport) -> Iterable[Finding]:
    """Scored responses that cannot teach anything, because those of a prompt are all worth the same."""
    share = groups.equal / groups.prompts
    if share < WEAK:
        return
    yield Finding(
        "data: groups without spread",
        "error" if share >= DEAD else "warning",
        f"the responses of {groups.equal} of {groups.prompts} prompts have one and the same reward",
        "score them on a finer scale, or add better and worse responses",
        "only differences within a prompt are learned from",
        "dataset.reward",
    )


def _judge_responses(session: Session) -> Iterable[Finding]:
    """Scored responses that are longer than training takes."""
    longest, train = session.recipe.generation.max_completion_length, session.data.train
    rows = train.select(spread(len(train), ROWS))
    lengths = [
        len(_encode(session.tokenizer, text)) + 1 for row in rows for text in row["responses"]
    ]
    cut = sum(length > longest for length in lengths) / len(lengths)
    if cut:
        yield Finding(
            "length: cut off",
            "warning" if cut >= CLIPPED else "note",
            f"{cut:.0%} of the responses are cut at {longest} tokens; the longest has {max(lengths)}",
            f"set `max_completion_length: {max(lengths)}`, or leave long ones out of the data",
            "the end of an answer is part of what its reward is for",
            "generation.max_completion_length",
        )


def _look_at_prompts(session: Session) -> None:
    from grpo_cli.fast.completions import count_prompt_tokens, declared_eos_token_ids
    from grpo_cli.models.loading import load_config, load_generation_config

    session.tell("looking at the prompts")
    train = session.data.train
    places = _choose_places(train)
    asked = list(train.select(places)["prompt"])
    count = partial(
        count_prompt_tokens, session.tokenizer, chat_template_kwargs=session.chat_kwargs
    )
    rendered = [prompts.render(session.tokenizer, each, session.chat_kwargs) for each in asked]
    session.add(prompts.check_differ(rendered))
    sample = prompts.PromptSample(
        rendered=rendered[0][:_SHOWN_LENGTH],
        lengths=tuple(count(prompt) for prompt in asked),
        places=tuple(places),
        total=len(train),
    )
    session.probe.prompts = sample
    recipe = session.recipe
    _plan(session, sample)
    config = load_config(recipe.model)
    session.add(
        prompts.check_lengths(
            sample,
            longest_allowed=recipe.dataset.max_prompt_length,
            completion=recipe.generation.max_completion_length,
            context=getattr(config.get_text_config(), "max_position_embeddings", None),
            vllm_length=read_setting(recipe, "vllm_max_model_length")
            if recipe.generation.backend == "vllm"
            else None,
        )
    )
    declared = declared_eos_token_ids(load_generation_config(recipe.model))
    session.add(prompts.check_stop_tokens(session.tokenizer, declared, asked, session.chat_kwargs))
    own_pad = session.tokenizer.init_kwargs.get("pad_token") is not None
    session.add(prompts.check_padding(session.tokenizer, own_pad))


def _choose_places(train: Any) -> list[int]:
    """Rows spread evenly over the data, and those with the longest prompts."""
    written = [len(text_of(prompt)) for prompt in train["prompt"]]
    longest = sorted(range(len(train)), key=lambda place: -written[place])[:LONGEST]
    return sorted({*spread(len(train), ROWS), *longest})


def _plan(session: Session, sample: prompts.PromptSample) -> None:
    """The batch arithmetic with the rows that are left once long prompts are dropped."""
    kept = len(sample.kept(session.recipe.dataset.max_prompt_length))
    rows = round(sample.total * kept / len(sample.lengths))
    held = session.data.report.eval_rows
    session.plan = plan_batch(
        batch_inputs(session.recipe, session.checked.num_processes, rows, held or None)
    )
    session.add(Finding.of("batch", problem) for problem in session.plan.problems)


def _try_rewards(session: Session, *, costly: bool) -> None:
    """The rewards on answers nobody sampled; a reward that fails is a finding, not the end."""
    session.tell("loading the rewards")
    recipe, train = session.recipe, session.data.train
    context = reward_context(recipe, pick_device(recipe.launch))
    session.rewards = tuple(build_rewards(recipe.rewards, context))
    for index, reward in enumerate(session.rewards):
        why = "the first checkpoint would end the training"
        with session.failing("rewards: state", why, f"rewards.{index}"):
            if has_state(reward):
                read_state(reward)
    if not costly and any(reward.params.costly for reward in session.rewards):
        return
    own = [reward for reward in session.rewards if reward.kind == "python"]
    # A function of the user's may want whole groups, which the trial does not give it.
    level: FindingLevel = "warning" if own else "error"
    with session.failing("rewards: failure", "the same error would end the training", "rewards"):
        _score_group(session, own)
        own = []
    if own:
        return
    why = "it met answers that nobody sampled, one for each row; in training it would end the run"
    with session.failing("rewards: failure", why, "rewards", level):
        session.add(_check_opening(session))
        try:
            trial = try_rewards(
                session.rewards,
                train,
                longest=recipe.generation.max_completion_length,
                encode=partial(_encode, session.tokenizer),
                budget_s=None if costly else QUICK_S,
                on_progress=session.tell,
            )
        except TooSlowError as error:
            session.add([_too_slow(error)])
            return
        session.probe.trial = trial
        session.add(Finding.of("rewards", problem) for problem in trial.problems)


def _score_group(session: Session, rewards: Sequence[Reward]) -> None:
    """Scores one group of plain answers, as training will call a reward."""
    from grpo_cli.fast.completions import Completion

    texts = [f"The answer is {n}." for n in range(session.recipe.generation.num_generations)]
    group = [
        Completion(text, tuple(_encode(session.tokenizer, text)), clipped=False) for text in texts
    ]
    score_samples(rewards, session.data.train.select([0]).to_dict(), [group])


def _too_slow(error: TooSlowError) -> Finding:
    return Finding(
        "rewards",
        "note",
        f"the rewards were not tried to the end: {error}",
        "try them once by themselves: grpo rewards test",
        "a training should not wait for it",
        "rewards",
    )


def _check_opening(session: Session) -> Iterable[Finding]:
    if session.probe.prompts is None:
        return []
    first = session.data.train.select([0]).to_dict()
    state = {"trainer_state": NO_TRAINER}
    row = Batch([first.pop("prompt")[0]], [""], columns=first, extra=state)
    encode = partial(_encode, session.tokenizer)
    return prompts.check_opening(session.probe.prompts.rendered, session.rewards, row, encode)


def _encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _estimate(session: Session, runs: Path) -> None:
    """Memory and disk; a model whose sizes cannot be counted goes without."""
    from grpo_cli.models.counting import read_shape

    session.tell("counting the model")
    recipe, plan = session.recipe, session.plan
    device = find_device(recipe)
    sample = session.probe.prompts
    if plan is None or sample is None:
        return
    longest = min(sample.longest, recipe.dataset.max_prompt_length or sample.longest)
    session.shape = read_shape(
        recipe.model,
        batch=recipe.training.per_device_train_batch_size,
        length=longest + recipe.generation.max_completion_length,
        activations="bfloat16" if device.autocast else None,
        cuda=device.kind == "cuda",
    )
    if session.shape.saved_bytes_per_token is None:
        session.add([_uncounted()])
    inputs = memory_inputs(recipe, device, longest, session.sampled_at_once())
    session.probe.memory = estimate_memory(session.shape, inputs)
    session.probe.memory_available = device.available
    cuda = device.kind == "cuda"
    memory = session.probe.memory
    session.add(resource_checks.judge_memory(memory, device.available, recipe, plan, cuda=cuda))
    session.probe.disk = cost.estimate_disk(recipe, plan, session.shape)
    session.add(resource_checks.judge_disk(session.probe.disk, _free_disk(runs)))


def _uncounted() -> Finding:
    return Finding(
        "cost: memory",
        "note",
        "activations are not in the estimate: they cannot be counted for this architecture",
        "watch the memory of the first steps",
        "with long completions they are the largest part",
    )


def _free_disk(runs: Path) -> int:
    folder = next(path for path in (runs, *runs.absolute().parents) if path.is_dir())
    return shutil.disk_usage(folder).free
