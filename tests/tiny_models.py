"""Tiny causal language models, made on the spot: random weights, a real byte-level tokenizer.

`make_tiny_model` writes what `from_pretrained` reads. The same arguments give the same files.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

PAD, BOS, END_OF_TEXT = "<|pad|>", "<|bos|>", "<|endoftext|>"
TURN_START, TURN_END = "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def make_tiny_model(
    folder: Path,
    *,
    kind: Literal["llama", "gpt2"] = "llama",
    chat: bool = True,
    vocab_words: Sequence[str] = (),
    hidden_size: int = 32,
    context_length: int = 512,
    seed: int = 0,
) -> Path:
    """Writes a two-layer model of about 40,000 weights and its tokenizer into `folder`.

    Args:
        folder: Where to; made if it is not there.
        kind: `llama` (rotary positions) or `gpt2` (learned positions: too long a prompt fails).
        chat: Whether there is a ChatML template, whose turns end with `<|im_end|>`; otherwise the
            end-of-sequence token is `<|endoftext|>`.
        vocab_words: Words that are one token each, besides the 256 bytes.
        hidden_size: Width of the model, a multiple of 4.
        context_length: Positions the model knows.
        seed: Seed of the weights.

    Returns:
        `folder`.
    """
    tokenizer = make_tiny_tokenizer(chat=chat, vocab_words=vocab_words)
    tokenizer.model_max_length = context_length
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _make_model(kind, tokenizer, hidden_size, context_length)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_tiny_classifier(
    folder: Path,
    *,
    labels: Sequence[str] = ("LABEL_0",),
    chat: bool = True,
    pad: bool = True,
    context_length: int = 512,
    seed: int = 0,
) -> Path:
    """Writes a two-layer llama that classifies texts, with the tokenizer of the tiny models.

    Args:
        folder: Where to; made if it is not there.
        labels: The labels' names; one makes a reward model.
        chat: Whether there is a ChatML template.
        pad: Whether there is a padding token.
        context_length: Positions the model knows.
        seed: Seed of the weights.

    Returns:
        `folder`.
    """
    tokenizer = make_tiny_tokenizer(chat=chat)
    tokenizer.model_max_length = context_length
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = _make_model("llama", tokenizer, 32, context_length).config
        config.id2label = dict(enumerate(labels))
        config.label2id = {label: index for index, label in enumerate(labels)}
        model = LlamaForSequenceClassification(config)
    if not pad:
        tokenizer.pad_token = None
        model.config.pad_token_id = None
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_tiny_tokenizer(
    *, chat: bool = True, vocab_words: Sequence[str] = ()
) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer of 261 tokens and one for each word, into which any text goes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    backend.add_special_tokens([PAD, BOS, END_OF_TEXT, TURN_START, TURN_END])
    backend.add_tokens(list(vocab_words))
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=TURN_END if chat else END_OF_TEXT,
        chat_template=CHAT_TEMPLATE if chat else None,
        clean_up_tokenization_spaces=False,
    )


def _make_model(
    kind: str, tokenizer: PreTrainedTokenizerFast, hidden_size: int, context_length: int
) -> PreTrainedModel:
    ids = {
        "vocab_size": len(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    if kind == "gpt2":
        shape = {"n_embd": hidden_size, "n_layer": 2, "n_head": 2, "n_positions": context_length}
        return GPT2LMHeadModel(GPT2Config(**shape, **ids))
    config = LlamaConfig(
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=context_length,
        initializer_range=0.1,
        **ids,
    )
    return LlamaForCausalLM(config)


def make_tiny_gguf(
    path: Path, *, pad_is_eos: bool = True, eot: bool = False, seed: int = 0
) -> Path:
    """Writes a tiny llama as a GGUF file of float32 tensors (needs the `gguf` package).

    Args:
        path: The file to write.
        pad_is_eos: Whether the metadata calls the end-of-sequence token the padding token too, as
            many files do; otherwise it names none.
        eot: Whether the metadata names `<|endoftext|>` as an end-of-turn token besides.
        seed: Seed of the weights.

    Returns:
        `path`.
    """
    import gguf

    tokenizer = make_tiny_tokenizer(chat=True, vocab_words=["12", "ĠĠ"])  # what the merges make
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    tokens = [token for token, _ in vocabulary]
    special = set(tokenizer.all_special_tokens) | {PAD, BOS, END_OF_TEXT, TURN_START, TURN_END}
    writer = gguf.GGUFWriter(path, "llama")
    _add_shape(writer, len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in special else 1 for token in tokens])
    writer.add_token_merges(["1 2", "Ġ Ġ"])
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)
    if pad_is_eos:
        writer.add_pad_token_id(tokenizer.eos_token_id)
    if eot:
        writer.add_eot_token_id(tokenizer.convert_tokens_to_ids(END_OF_TEXT))
    generator = torch.Generator().manual_seed(seed)
    for name, shape in _gguf_shapes(len(tokens)).items():
        writer.add_tensor(name, (torch.randn(shape, generator=generator) * 0.1).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_shape(writer: Any, vocabulary_size: int) -> None:
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(vocabulary_size)


def _gguf_shapes(vocabulary_size: int) -> dict[str, tuple[int, ...]]:
    """The tensors of a one-layer llama with tied embeddings, under llama.cpp's names."""
    return {
        "token_embd.weight": (vocabulary_size, 32),
        "output_norm.weight": (32,),
        "blk.0.attn_norm.weight": (32,),
        "blk.0.ffn_norm.weight": (32,),
        **{f"blk.0.attn_{part}.weight": (32, 32) for part in ("q", "k", "v", "output")},
        "blk.0.ffn_gate.weight": (64, 32),
        "blk.0.ffn_up.weight": (64, 32),
        "blk.0.ffn_down.weight": (32, 64),
    }


def make_guesser(folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """Write a model that knows how to answer the game of the offline recipes, and guesses blindly.

    Its layers add nothing, so that a token depends on the one before alone: a digit, then the end of the answer.

    Args:
        folder: Where to.
        tokenizer: Of the recipes' `tiny-guesser`.
    """
    # vLLM's kernels require heads of 32 and more.
    model = _make_model("llama", tokenizer, 128, 256)
    words, start, end = len(tokenizer), *tokenizer.convert_tokens_to_ids([TURN_START, TURN_END])
    digits = tokenizer.convert_tokens_to_ids(list("123456789"))
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        embedding.copy_(torch.eye(*embedding.shape))
        head.zero_()
        # The norm before the head makes an embedding's 1 the root of its width.
        head[end, :words] = 10.0
        head[end, start] = 0.0
        head[digits, start] = 10.0
        head[digits[4], start] += 1e-3
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
