"""A tiny model of nine tokens that calls tools and answers at random, and a room for it to act in."""

from pathlib import Path

import torch
import trl
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
WRONG = '<tool_call>{"name": "sub", "arguments": {}}</tool_call>'
MALFORMED = "<tool_call>add</tool_call>"
HEADER = "<|im_start|>assistant\n"
"""By which the parser of answers finds where one begins."""
WORDS = ["<|pad|>", "<|im_end|>", "other", CALL, WRONG, MALFORMED, HEADER, "a", "1"]
# The worker ends by SIGKILL in the middle of an episode, once, if `die` names after how many steps of rooms. Each
# room has a process of its own. Every fourth room gives all episodes 0.
ROOM = """\
import os
import signal
import subprocess
from pathlib import Path

steps = []

def add(a: int, b: int) -> str:
    '''Add.

    Args:
        a: One number.
        b: Another.
    '''
    return "a " * (a + b)

class Room:
    def reset(self, seed):
        self.process = subprocess.Popen(["sleep", "1789"])
        self.turns, self.said, self.needed = 0, [], 1 + seed % 3
        self.pays = seed % 4 > 0
        return "a 1"

    def step(self, text):
        steps.append(text)
        die = Path(__file__).with_name("die")
        if die.exists() and len(steps) > int(die.read_text()):
            die.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        self.said += text.split()
        self.turns += 1
        return "1 " * self.turns, self.turns == self.needed

    def reward(self):
        return {"as": self.pays * 0.25 * self.said.count("a"), "turns": self.pays * self.turns}

    def close(self):
        self.process.kill()
        self.process.wait()
"""
RECIPE = """\
name: agent
seed: 1
model: {{path: {model}, dtype: float32}}
dataset: {{kind: environment, size: 40, eval_size: 4}}
tools: [{{kind: function, path: ./room.py:add}}]
environment: {{kind: python, path: ./room.py:Room}}
episode: {{max_turns: 4, max_turn_tokens: 8}}
rewards: [{{kind: environment}}, {{kind: tool_use, weight: 0.5}}]
generation: {{num_generations: 4, max_completion_length: 120}}
training:
  per_device_train_batch_size: 16
  max_steps: 4
  learning_rate: 1e-2
  gradient_checkpointing: false
evaluation: {{temperature: 1.0}}
launch: {{use_cpu: true}}
"""


def make_agent(folder: Path, hidden_size: int = 32) -> Path:
    """Write the model and its tokenizer, with Qwen's chat template, into `folder`."""
    backend = Tokenizer(models.WordLevel(dict(zip(WORDS, range(9), strict=True)), "other"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(WORDS[:2])
    backend.add_tokens(WORDS[3:7])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token=WORDS[0], eos_token=WORDS[1], unk_token="other"
    )
    tokenizer.chat_template = (
        Path(trl.__file__).parent / "chat_templates" / "qwen2_5.jinja"
    ).read_text()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        initializer_range=0.1,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
