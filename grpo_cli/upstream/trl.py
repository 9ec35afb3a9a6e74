"""TRL's internal names and the names of its metrics. Does not import TRL."""

VERSION = "1.16.0"

REWARD = "reward"
REWARD_STD = "reward_std"
FRAC_ZERO_STD = "frac_reward_zero_std"
"""Share of groups without signal: all completions have the same total reward."""
NUM_TOKENS = "num_tokens"
ENTROPY = "entropy"
KL = "kl"
MEAN_LENGTH = "completions/mean_length"
CLIPPED_RATIO = "completions/clipped_ratio"
CLIP_LOW, CLIP_HIGH = "clip_ratio/low_mean", "clip_ratio/high_mean"
CLIP_REGION = "clip_ratio/region_mean"
CLIP_LOW_MIN, CLIP_HIGH_MAX = "clip_ratio/low_min", "clip_ratio/high_max"
CISPO_CLIP = "cispo_clip_ratio"
VESPO_PHI = "vespo/phi_seq_mean"
POLICY_LOSS, ENTROPY_COEF = "policy_loss", "entropy_coef"
LOGP_DIFFERENCE = "sampling/sampling_logp_difference/mean"
LOGP_DIFFERENCE_MAX = "sampling/sampling_logp_difference/max"
IS_RATIO_MIN = "sampling/importance_sampling_ratio/min"
IS_RATIO_MAX = "sampling/importance_sampling_ratio/max"
STEP_TIME = "step_time"
EVAL_METRICS = (
    REWARD,
    REWARD_STD,
    FRAC_ZERO_STD,
    ENTROPY,
    KL,
    NUM_TOKENS,
    "aux_loss",
    CISPO_CLIP,
    MEAN_LENGTH,
    "completions/min_length",
    "completions/max_length",
    CLIPPED_RATIO,
    "completions/mean_terminated_length",
    "completions/min_terminated_length",
    "completions/max_terminated_length",
    CLIP_LOW,
    CLIP_HIGH,
    CLIP_REGION,
    CLIP_LOW_MIN,
    CLIP_HIGH_MAX,
)
"""What evaluation logs besides the rewards; some of them depend on the loss."""
ASYNC_WAIT, ASYNC_SYNC = "perf/rollout_wait_s", "perf/weight_sync_s"
ASYNC_LEARNING, ASYNC_STEP = "perf/fwd_bwd_s", "perf/step_s"
ASYNC_TOKENS = "batch/forwarded_tokens_per_step"
LITERALS = {
    "trl.trainer.grpo_trainer": (
        *EVAL_METRICS,
        VESPO_PHI,
        LOGP_DIFFERENCE,
        LOGP_DIFFERENCE_MAX,
        IS_RATIO_MIN,
        IS_RATIO_MAX,
        POLICY_LOSS,
        ENTROPY_COEF,
        STEP_TIME,
    ),
    "trl.experimental.async_grpo.async_grpo_trainer": (
        ASYNC_WAIT,
        ASYNC_SYNC,
        ASYNC_LEARNING,
        ASYNC_STEP,
        ASYNC_TOKENS,
    ),
}
"""Modules and the metric names they log."""


def reward_metric(reward: str, statistic: str = "mean") -> str:
    """Return the name under which a reward's `mean` or `std` is logged."""
    return f"rewards/{reward}/{statistic}"


_TRAINER = "trl.trainer.grpo_trainer.GRPOTrainer"
_ASYNC = "trl.experimental.async_grpo"

METHODS = {
    # The step (`fast/trainer.py`).
    f"{_TRAINER}._compute_loss": "model, inputs",
    f"{_TRAINER}._get_per_token_logps_and_entropies": (
        "model, input_ids, attention_mask, logits_to_keep, batch_size, compute_entropy, compute_aux_loss, "
        "pixel_values, image_grid_thw, num_images, pixel_attention_mask, spatial_shapes, num_tiles, image_sizes, "
        "token_type_ids, mm_token_type_ids, image_position_ids"
    ),
    f"{_TRAINER}._prepare_inputs": "generation_batch",
    # Sampling and scoring (`training/trainer.py`).
    f"{_TRAINER}._tokenize_prompts": "prompts",
    f"{_TRAINER}._generate_single_turn": (
        "prompt_ids, images, multimodal_fields, num_generations, has_tool_images"
    ),
    f"{_TRAINER}._generate_and_score_completions": "inputs",
    # Checkpoints and exact resume (`training/checkpoints.py`).
    f"{_TRAINER}._save_checkpoint": "model, trial",
    # Weights for vLLM, with adapters merged in a copy.
    "trl.generation.vllm_generation.VLLMGeneration._iter_named_params": "",
    "trl.generation.vllm_client.VLLMClient._post": "url, kwargs",
    # Images for vLLM, which expands them itself.
    "trl.generation.vllm_generation.VLLMGeneration._place_features": "features, prompt_ids",
    "trl.generation.vllm_client.VLLMClient._generate_from_features": (
        "prompts, features, sampling_params, max_concurrent_requests"
    ),
    f"{_ASYNC}.async_grpo_trainer.AsyncGRPOTrainer._init_lora_sync": "model",
    f"{_ASYNC}.async_grpo_trainer.AsyncGRPOTrainer._sync_weight_merged": "t0",
    f"{_ASYNC}.async_grpo_trainer.AsyncGRPOTrainer._streaming_iter": "",
    # Requests that are watched (`training/asynchronous/trainer.py`).
    **{
        f"{_ASYNC}.vllm_client.VLLMClient.{name}": parameters
        for name, parameters in {
            "pause": "timeout",
            "start_weight_update": "timeout",
            "update_weights": "update_info, timeout",
            "finish_weight_update": "timeout",
            "resume": "timeout",
        }.items()
    },
}
"""Methods that are called or overridden, with their parameters after `self`."""

ATTRIBUTES = {
    _TRAINER: (
        "_buffered_inputs _current_train_step_time _metrics _pending_extra_logs _pending_metrics _step _tokenizer "
        "aux_loss_enabled eos_token_ids generation_config generation_kwargs importance_sampling_level loss_type "
        "mask_truncated_completions multi_objective_aggregation num_generations num_generations_eval "
        "num_iterations pad_to_multiple_of ref_model reward_func_names reward_weights temperature vllm_generation"
    ),
    f"{_ASYNC}.async_grpo_trainer.AsyncGRPOTrainer": (
        "_step_samples rollout_worker weight_transfer"
    ),
    f"{_ASYNC}.weight_transfer.WeightTransferClient": "vllm",
    "trl.generation.vllm_generation.VLLMGeneration": (
        "_dist llm mode model server_timeout tensor_parallel_size vllm_client"
    ),
    "trl.generation.vllm_client.VLLMClient": "base_url communicator group_port host model session",
}
"""Attributes of instances that are read or set."""

NAMES = {
    "trl.trainer.grpo_trainer": "VLLMGeneration create_model_from_path",
    "trl.generation.vllm_generation": "LLM VLLMClient",
    # Whether the output head computes the logits of labelled tokens alone (`training/warmup.py`).
    "trl.trainer.utils": "_use_triton nanstd",
    "trl.chat_template_utils": "parse_response",
    "trl.data_utils": "is_conversational",
    f"{_ASYNC}.async_grpo_trainer": "get_peak_flops_per_device",
    f"{_ASYNC}.async_rollout_worker": "RolloutSample",
    f"{_ASYNC}.packing": "TREE_ATTENTION",
    f"{_ASYNC}.vllm_client": "VLLMClient",
}
"""Names that are imported from internal modules, or replaced in them."""
