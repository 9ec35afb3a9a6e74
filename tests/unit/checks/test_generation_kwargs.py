"""Settings of `generate()` that `check` refuses are those with which TRL's call of it fails."""

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from grpo_cli.checks.generation import NOT_FOR_TRAINING, check_sampling
from grpo_cli.recipe.loading import load_recipe
from tests.contexts import make_context
from tests.recipe_texts import write_recipe
from tests.tiny_models import make_tiny_model

OPTIONS = "generation.generation_kwargs"
VALUES = {
    **dict.fromkeys(("num_beams", "num_return_sequences", "no_repeat_ngram_size"), 2),
    **dict.fromkeys(("min_length", "min_new_tokens", "prompt_lookup_num_tokens"), 2),
    **dict.fromkeys(("encoder_no_repeat_ngram_size", "max_matching_ngram_size"), 2),
    **dict.fromkeys(("assistant_early_exit", "forced_bos_token_id", "forced_eos_token_id"), 1),
    **dict.fromkeys(("num_assistant_tokens", "assistant_lookbehind", "target_lookbehind"), 3),
    **dict.fromkeys(("low_memory", "num_beam_groups", "prefill_chunk_size", "max_length"), 2),
    **{key: [3] for key in ("suppress_tokens", "begin_suppress_tokens", "constraints")},
    **{key: [[3]] for key in ("force_words_ids", "bad_words_ids")},
    **dict.fromkeys(("early_stopping", "use_mtp", "renormalize_logits", "is_assistant"), True),
    **dict.fromkeys(("remove_invalid_values", "token_healing", "disable_compile"), True),
    **dict.fromkeys(("output_attentions", "output_hidden_states", "output_scores"), True),
    **dict.fromkeys(("output_logits", "return_dict_in_generate"), True),
    **dict.fromkeys(("top_h", "typical_p", "epsilon_cutoff", "eta_cutoff", "penalty_alpha"), 0.5),
    **dict.fromkeys(("guidance_scale", "encoder_repetition_penalty", "length_penalty"), 1.5),
    "sequence_bias": [[[3], 1.0]],
    "exponential_decay_length_penalty": [2, 1.1],
    "watermarking_config": {"bias": 2.0},
    "compile_config": {"mode": "default"},
    "dola_layers": "low",
    "cache_implementation": "static",
    "max_time": 600.0,
    "use_cache": False,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    model = AutoModelForCausalLM.from_pretrained(make_tiny_model(tmp_path_factory.mktemp("model")))
    model.generation_config.pad_token_id = 0
    return model


def fails(model, name, value):
    """Whether a call as TRL makes it raises, or returns another shape than one row a prompt."""
    prompts = torch.tensor([[3, 4, 5], [6, 7, 8]])
    options = {"max_new_tokens": 6, "do_sample": True, "pad_token_id": 0, name: value}
    try:
        config = GenerationConfig(**options, disable_compile=True)
        output = model.generate(
            prompts, attention_mask=torch.ones_like(prompts), generation_config=config
        )
        return len(output[:, 3:]) != 2
    except (TypeError, ValueError):
        return True


def test_settings_are_refused_exactly_if_the_call_fails(model):
    assert VALUES.keys() <= vars(GenerationConfig()).keys()
    failing = {name for name, value in VALUES.items() if fails(model, name, value)}
    assert failing == NOT_FOR_TRAINING.keys() - {"n"}


def test_they_are_refused_with_a_fix_and_their_neutral_values_are_not(tmp_path):
    def check(options):
        recipe = load_recipe(write_recipe(tmp_path), [f"{OPTIONS}={options}"])
        return {each.path: each for each in check_sampling(make_context(recipe))}

    for name in (*NOT_FOR_TRAINING, "output_scores"):
        issue = check(f"{{{name}: {VALUES.get(name, 2)}}}")[f"{OPTIONS}.{name}"]
        assert issue.fix == "remove it"
        assert issue.level == ("error" if name in NOT_FOR_TRAINING else "warning")
    neutral = "{n: 1, num_return_sequences: 1, return_dict_in_generate: false, use_mtp: null}"
    assert not check(neutral)
