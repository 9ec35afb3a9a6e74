"""What learning would cost on a GPU: bytes that attention keeps, and where the host waits in a step."""

import dataclasses
from typing import Any

import torch
from datasets import Dataset

from grpo_cli.fast.attention import attend_segments
from grpo_cli.fast.layout import Segments, lay_out
from grpo_cli.fast.trainer import FastTrainer
from grpo_cli.recipe.training import FastConfig
from grpo_cli.training.asynchronous.trainer import attend
from tests.fake_cuda import example
from tests.fake_cuda.device import FakeCuda


def make_segments(prompts: int, group: int, prompt: int, completion: int) -> Segments:
    """Return the segments of prompts with a group of completions each, on the CPU."""
    ids = torch.arange(prompts)[:, None].repeat(group, prompt + completion + 1).flatten(0, 1)
    ids = ids.view(group * prompts, -1).sort(0)[0]
    padded = ids.numpy(), torch.ones_like(ids).numpy()
    layout = lay_out(padded, completion + 1, ids.device)
    assert layout is not None
    return layout.segments


def measure(folder: str, cases: list[Any]) -> dict[str, Any]:
    """Return all that this module counts, by one process."""
    return {
        "example": example.run(),
        "bytes": count_bytes(cases),
        "step": count_reads(folder),
        "tree": attend_tree(),
    }


def count_bytes(cases: list[Any]) -> list[dict[str, int]]:
    """Return the bytes an attention layer keeps in bf16, and those of queries, outputs, keys and values alone.

    Args:
        cases: Heads, key heads and their size; prompts, completions of each, and their tokens.
    """
    return [_count_bytes(*shape, make_segments(*batch)) for shape, batch in cases]


def _count_bytes(heads: int, key_heads: int, size: int, segments: Segments) -> dict[str, int]:
    with FakeCuda("meta") as device:
        tensors = {
            field.name: device.put(value)
            for field in dataclasses.fields(segments)
            if isinstance(value := getattr(segments, field.name), torch.Tensor)
        }
        moved = dataclasses.replace(segments, **tensors)

        def draw(count: int) -> torch.Tensor:
            shape = (segments.tokens, count, size)
            return torch.empty(shape, dtype=torch.bfloat16, device="cuda").requires_grad_()

        query, key, value = draw(heads), draw(key_heads), draw(key_heads)
        with device.kept() as kept:
            attend_segments(query, key, value, moved).sum().backward()
    least = 2 * size * (2 * segments.tokens * heads + 2 * len(segments.kv_index) * key_heads)
    return {"kept": kept.bytes, "least": least}


def count_reads(folder: str) -> dict[str, Any]:
    """Return how often the host waits in an optimizer step, by the line that makes it wait, and its micro-batches.

    Args:
        folder: Of a tiny model with its tokenizer.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    args = GRPOConfig(
        output_dir=folder,
        report_to=[],
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        num_generations=4,
        gradient_checkpointing=True,
    )
    trainer = FastTrainer(
        model=model,
        reward_funcs=[lambda completions, **_: [0.0] * len(completions)],
        args=args,
        train_dataset=Dataset.from_dict({"prompt": ["a"] * 16}),
        processing_class=AutoTokenizer.from_pretrained(folder, padding_side="left"),
    )
    left_off: dict[str, str] = {}
    trainer.speed_up(FastConfig(sampling=False, max_tokens_per_micro_batch=40), left_off.update)
    passes, compute_loss = [], trainer.compute_loss
    trainer.compute_loss = lambda *batch, **options: (
        passes.append(batch) or compute_loss(*batch, **options)
    )
    trainer.current_gradient_accumulation_steps = 2
    with FakeCuda() as device:
        trainer.accelerator.state.device = torch.device("cuda:0")
        device.put_model(trainer.model)
        trainer._settle(trainer.model)
        window = [
            {name: device.put(value) for name, value in _make_rows(seed).items()} for seed in (0, 1)
        ]
        device.reset()
        loss, counts = trainer._learn(trainer.model, window)
        trainer._log_step(counts)
        reads, uploads = dict(device.reads), dict(device.blocking_uploads)
        value = float(loss)
    seen = {"micro_batches": len(passes), "reads": reads, "uploads": uploads}
    return {"left_off": left_off, "loss": value, **seen}


def attend_tree() -> dict[str, Any]:
    """Return what two layers of the asynchronous trainer's attention do in 16 bits, and how far off they are."""
    # A prompt of 5 tokens, and two completions of 3 and 2.
    row = {
        "tree_kv_index": torch.tensor([*range(5), *range(8), *range(5), 8, 9]),
        "tree_cu_seqlens_q": torch.tensor([0, 5, 8, 10], dtype=torch.int32),
        "tree_cu_seqlens_k": torch.tensor([0, 5, 13, 20], dtype=torch.int32),
    }
    longest = {"tree_max_seqlen_q": 5, "tree_max_seqlen_k": 8}
    draw = torch.Generator().manual_seed(0)
    sides = [torch.randn(1, heads, 10, 16, generator=draw) for heads in (4, 2, 2)]
    expected, _ = attend(torch.nn.Identity(), *sides, None, **row, **longest)
    with FakeCuda() as device:
        # As autocast has them: queries and keys in float32 after rotary positions, values in 16 bits.
        query, key, value = (device.put(side) for side in sides)
        placed = {name: device.put(index) for name, index in row.items()}
        with torch.autocast("cuda", torch.bfloat16):
            for _ in range(2):
                output, _ = attend(
                    torch.nn.Identity(), query, key, value.bfloat16(), None, **placed, **longest
                )
        reads, kernels = dict(device.reads), dict(device.kernels)
        difference = float((output.cpu().float() - expected).abs().max())
    return {"reads": reads, "kernels": kernels, "difference": difference}


def _make_rows(seed: int) -> dict[str, torch.Tensor]:
    """Two groups of four completions of at most 12 tokens; half of them without signal."""
    draw = torch.Generator().manual_seed(seed)
    prompts = torch.randint(5, 200, (2, 9), generator=draw).repeat_interleave(4, 0)
    lengths = torch.randint(1, 13, (8, 1), generator=draw)
    return {
        "prompt_ids": prompts,
        "prompt_mask": torch.ones_like(prompts),
        "completion_ids": torch.randint(5, 200, (8, 12), generator=draw),
        "completion_mask": (torch.arange(12) < lengths).long(),
        "advantages": torch.tensor([1.0, 0.0] * 4),
        "num_items_in_batch": torch.tensor(80),
    }
