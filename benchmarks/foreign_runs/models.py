"""The tiny models that are trained: they answer, and not yet well, as a model from the Hub does."""

import random
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tests.tiny_models import make_tiny_tokenizer

WORDS = tuple(f" {word}" for word in "good bad cat dog runs sits red blue and then old new".split())
TOPICS = tuple("abcdefghijklmnopqrstuvwxyz")
_BATCH, _TOKENS = 64, 40


def sum_text(chance: random.Random, right: float) -> tuple[str, str]:
    """`3+4=` and a number: right with this probability, otherwise wrong by up to 3."""
    first, second = chance.randint(0, 9), chance.randint(0, 9)
    wrong = chance.choice([-3, -2, -1, 1, 2, 3])
    answer = first + second + (0 if chance.random() < right else wrong)
    return f"{first}+{second}=", str(max(answer, 0))


def think_text(chance: random.Random, right: float) -> tuple[str, str]:
    """A sum after some filler, in tags in half of the answers."""
    question, answer = sum_text(chance, right)
    filler = " hm" * chance.randint(1, 9)
    tagged = chance.random() < 0.5
    return f"Q {question}", f"{filler} <a>{answer}</a>" if tagged else f"{filler} {answer}"


def long_text(chance: random.Random, right: float) -> tuple[str, str]:
    """A sum after 18 to 26 words."""
    question, answer = sum_text(chance, right)
    words = "".join(chance.choice(WORDS) for _ in range(chance.randint(18, 26)))
    return f"L {question}", f"{words} <a>{answer}</a>"


def talk_text(chance: random.Random, right: float) -> tuple[str, str]:
    """A letter to talk about, and words; each may be the last one."""
    words = []
    while not words or chance.random() > 1 / 12:
        words.append(chance.choice(WORDS))
    return f"Say {chance.choice(TOPICS)}:", "".join(words)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer; each word of the tasks is one token."""
    return make_tiny_tokenizer(chat=False, vocab_words=(*WORDS, " hm", "<a>", "</a>"))


def make_base(folder: Path, *, right: float, seed: int, steps: int = 800) -> Path:
    """Write a model that was trained on texts of all tasks, unless it is there.

    Args:
        folder: Where to.
        right: Share of right sums among the texts.
        seed: Seed of weights and texts.
        steps: Batches of 64 texts.

    Returns:
        `folder`.
    """
    if (folder / "config.json").is_file():
        return folder
    torch.manual_seed(seed)
    chance = random.Random(seed)
    tokenizer = make_tokenizer()
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=256,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=steps)
    for _ in range(steps):
        ids, labels = _make_batch(tokenizer, chance, right)
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _make_batch(
    tokenizer: PreTrainedTokenizerFast, chance: random.Random, right: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Texts of all tasks, [64, 40] int64, and labels that leave out prompts and padding."""
    kinds: list[Callable[[random.Random, float], tuple[str, str]]]
    kinds = [sum_text, sum_text, think_text, long_text, talk_text]
    ids = torch.full((_BATCH, _TOKENS), tokenizer.pad_token_id)
    labels = torch.full((_BATCH, _TOKENS), -100)
    for row in range(_BATCH):
        prompt, completion = chance.choice(kinds)(chance, right)
        start = tokenizer(prompt)["input_ids"]
        end = [*tokenizer(completion)["input_ids"], tokenizer.eos_token_id]
        text = torch.tensor([*start, *end])[:_TOKENS]
        ids[row, : len(text)] = text
        labels[row, len(start) : len(text)] = text[len(start) :]
    return ids, labels
