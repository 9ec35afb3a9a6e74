"""The work of an evaluation: every chunk of every subject sampled, scored and written down.

Owns the order, and what an interrupted evaluation still has to do. The same chunks come out on one
process and on many, since each has its own prompts and its own seed.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from grpo_cli.analysis.samples import score_samples
from grpo_cli.checks.contents import reward_context
from grpo_cli.data.build import build_datasets
from grpo_cli.errors import UsageError
from grpo_cli.eval.chunks import Chunk, make_chunks, share
from grpo_cli.eval.folder import EvalFolder
from grpo_cli.eval.request import EvalRequest, Progress, Subject
from grpo_cli.eval.samplers import Sample, TransformersModels, VllmModels
from grpo_cli.fast.completions import count_prompt_tokens
from grpo_cli.models.loading import load_tokenizer
from grpo_cli.recipe.model import ModelConfig
from grpo_cli.rewards.building import build_rewards
from grpo_cli.rewards.scoring import Reward


@dataclass(frozen=True)
class Place:
    """Which of how many processes this is, and the device it works on."""

    rank: int
    world: int
    device: Any
    """A `torch.device`."""


def measure(request: EvalRequest, folder: EvalFolder, place: Place, tell: Progress) -> None:
    """Measures this process's share of all subjects.

    Args:
        request: What is asked for.
        folder: Where samples go; chunks that are there already are left out.
        place: This process.
        tell: Told how far it is.

    Raises:
        GrpoError: The data, a model or a reward cannot be loaded, or a reward fails; or the
            evaluation goes on, and was begun with other data.
    """
    models = (
        VllmModels(request)
        if request.backend == "vllm"
        else TransformersModels(request, place.device)
    )
    rewards = build_rewards(
        request.recipe.rewards, reward_context(request.recipe, str(place.device))
    )
    plans = _plan(request, folder)
    if place.rank == 0:
        folder.write_about(plans[0][2])
    for subject, (rows, chunks, _) in zip(request.subjects, plans, strict=True):
        tell(subject.name, 0, 0)
        with models.open(subject) as (_, sample):
            _measure_one(request, folder, place, subject, sample, (rows, chunks, rewards), tell)


def _plan(
    request: EvalRequest, folder: EvalFolder
) -> list[tuple[Any, list[Chunk], dict[str, Any]]]:
    """The rows, chunks and data of each subject, before the first of them is loaded.

    Raises:
        GrpoError: A subject's tokenizer cannot be had, or gives other prompts than the first one's.
    """
    known: list[tuple[ModelConfig, tuple[Any, list[Chunk], dict[str, Any]]]] = []
    plans = []
    for subject in request.subjects:
        plan = next((plan for model, plan in known if model == subject.model), None)
        if plan is None:
            rows, lengths, about = _read_rows(request, load_tokenizer(subject.model))
            plan = (rows, make_chunks(lengths, request.chunk_size, request.seed), about)
            known.append((subject.model, plan))
        if plan[2] != known[0][1][2]:
            raise UsageError(
                f"`{subject.name}` gets other prompts than `{request.subjects[0].name}`: its chat template "
                "(or, with `max_prompt_length`, its tokenizer) differs. Fix: measure it by itself, with "
                "--baseline none"
            )
        plans.append(plan)
    folder.check_about(known[0][1][2])
    return plans


def _read_rows(request: EvalRequest, tokenizer: Any) -> tuple[Any, list[int], dict[str, Any]]:
    """The rows to measure on, the tokens of their prompts, and what the data is."""
    count = partial(
        count_prompt_tokens,
        tokenizer,
        chat_template_kwargs=request.recipe.generation.extras.get("chat_template_kwargs"),
    )
    data = build_datasets(
        request.recipe,
        has_chat_template=bool(tokenizer.chat_template),
        # Counting takes long, and only a limit asks for it.
        count_tokens=count if request.recipe.dataset.max_prompt_length else None,
    )
    rows = data.train if request.split == "train" else data.eval
    if rows is None or len(rows) == 0:
        raise UsageError(
            "the recipe holds no rows out to measure on. Fix: give the dataset an eval split (`eval`, "
            "`eval_split`, `eval_size` or `eval_fraction`), or measure on --split train"
        )
    if request.limit is not None:
        rows = rows.select(range(min(request.limit, len(rows))))
    about = {
        "split": request.split,
        "rows": len(rows),
        "fingerprint": data.report.fingerprint,
        "exact_duplicates_between_splits": data.report.exact_duplicates_between_splits,
    }
    return rows, [count(prompt) for prompt in rows["prompt"]], about


def _measure_one(
    request: EvalRequest,
    folder: EvalFolder,
    place: Place,
    subject: Subject,
    sample: Sample,
    work: tuple[Any, Sequence[Chunk], Sequence[Reward]],
    tell: Progress,
) -> None:
    rows, chunks, rewards = work
    done = folder.samples.read(subject.name).keys()
    mine = share(chunks, place.rank, place.world)
    total = request.samples * sum(len(chunk.places) for chunk in mine)
    finished = request.samples * sum(len(chunk.places) for chunk in mine if chunk.number in done)
    tell(subject.name, finished, total)
    to_do = [chunk for chunk in mine if chunk.number not in done]
    for index, chunk in enumerate(to_do):
        chosen = rows.select(list(chunk.places))
        started = time.perf_counter()
        sampled = sample(list(chosen["prompt"]), chunk.seed)
        seconds = time.perf_counter() - started
        scored = score_samples(rewards, chosen.to_dict(), sampled, chunk.seed)
        folder.samples.append(subject.name, place.rank, chunk, seconds, scored, warms_up=index == 0)
        finished += len(scored)
        tell(subject.name, finished, total)
