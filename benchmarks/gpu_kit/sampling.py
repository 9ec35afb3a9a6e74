"""Tokens a second of `grpo`'s sampler, of its loop over CUDA graphs, and of plain `generate()`."""

import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch
from transformers import GenerationConfig

from benchmarks.gpu_kit.bench import Batch, Bench, Row, estimate_gib, noted
from grpo_cli.fast import decoding
from grpo_cli.fast.decoding import without_wrapper
from grpo_cli.fast.graph_decoding import decode_with_graphs

_REPEATS = 3
_GROUP = 8
_CELL_S = 5.0
"""After so many seconds a call is not repeated."""

Sampler = Callable[[], int]
"""Samples once and returns the number of tokens."""


def make_samplers(
    bench: Bench, model: Any, *, rows: int, new: int, prompt: int
) -> Iterator[tuple[str, Sampler]]:
    """Each way to sample `rows` completions of `new` tokens, eight of each prompt; none ends earlier."""
    generator = torch.Generator().manual_seed(0)
    distinct = torch.randint(5, 200, (rows // _GROUP, prompt), generator=generator)
    ids = distinct.repeat_interleave(_GROUP, 0).to(bench.device)
    mask, prompts = torch.ones_like(ids), ids.tolist()
    bare = without_wrapper(model.eval())
    pad = bench.tokenizer.pad_token_id
    bare.generation_config = GenerationConfig(pad_token_id=pad)
    config = GenerationConfig(
        max_new_tokens=new, do_sample=True, top_k=0, pad_token_id=pad, disable_compile=True
    )
    settings = decoding.read_decoding(config, bare.generation_config)

    def generate() -> int:
        with torch.no_grad():
            found = model.generate(input_ids=ids, attention_mask=mask, generation_config=config)
        return int(found[:, prompt:].numel())

    def sample_by(decode: Any) -> Sampler:
        return lambda: sum(map(len, decode(bare, prompts, settings).completion_ids))

    yield "generate()", generate
    yield "grpo", sample_by(decoding.decode)
    yield "CUDA graphs", sample_by(decode_with_graphs)


def measure_sampling(bench: Bench) -> Iterator[Row]:
    """Tokens a second by batch size, with and without adapters, and the sampler's peak memory."""
    name, prompt, new = "1.5B", bench.size(256), bench.size(64)
    for lora in (False, True):
        model = bench.make_model(name, torch.bfloat16, lora=lora)
        for rows in (8,) if bench.tiny else (64, 256, 8):
            row: Row = {"model": f"{name}{' LoRA' if lora else ''}", "batch": rows}
            batch = Batch(prompt, (new,) * bench.size(rows), _GROUP)
            ways = make_samplers(bench, model, rows=batch.rows, new=new, prompt=prompt)
            for way, sample in ways:
                if not bench.has_time():
                    return
                bench.reset_peak()
                with noted(row, way):
                    row[f"{way} tokens/s"] = _measure_rate(bench, sample)
                if way == "grpo":
                    options = {"lora": lora, "shares": None}
                    row["grpo GiB"] = bench.peak_gib()
                    row["grpo estimate GiB"] = estimate_gib(
                        bench, name, batch, torch.bfloat16, **options
                    )
            yield row


def _measure_rate(bench: Bench, sample: Sampler) -> float:
    """Median tokens a second after a first call that is not counted."""
    sample()
    rates: list[float] = []
    first = time.monotonic()
    while len(rates) < _REPEATS and (not rates or time.monotonic() - first < _CELL_S):
        started = bench.now()
        tokens = sample()
        rates.append(tokens / (bench.now() - started))
    return median(rates)
