"""axolotl's keys that a recipe has no place for, each with the reason, and those with another name.

Source: axolotl, `src/axolotl/utils/schemas/` (config, training, trl, vllm, peft, model), docs/grpo.qmd.
"""

RENAMED: dict[str, str] = {
    "micro_batch_size": "per_device_train_batch_size",
    "eval_batch_size": "per_device_eval_batch_size",
    "num_epochs": "num_train_epochs",
}
"""Top-level keys and the fields of `GRPOConfig` they become."""

SAME: tuple[str, ...] = tuple(
    """learning_rate gradient_accumulation_steps max_steps weight_decay adam_beta1 adam_beta2 adam_epsilon
    max_grad_norm lr_scheduler_kwargs optim_target_modules warmup_steps eval_strategy save_strategy
    eval_steps save_steps save_total_limit save_only_model load_best_model_at_end metric_for_best_model
    greater_is_better logging_steps gradient_checkpointing_kwargs torch_compile torch_compile_backend
    torch_compile_mode neftune_noise_alpha fp16 tf32 dataloader_pin_memory dataloader_num_workers
    dataloader_prefetch_factor dataloader_drop_last ddp_timeout ddp_bucket_cap_mb
    ddp_broadcast_buffers ddp_find_unused_parameters include_num_input_tokens_seen label_smoothing_factor
    torch_empty_cache_steps save_on_each_node""".split()
)
"""Top-level keys that go by TRL's own names."""

_TEXTS = "the tokenizer's own are used; change them in the model's folder"
_SUPERVISED = "for supervised training; GRPO writes its own completions"
_ROWS = "rows are read as they are; `dataset.limit` takes the first ones"
_ASYNC = "of axolotl's asynchronous trainer, which this is not"
_KERNELS = "kernels of axolotl's own"
_HUB = "nothing is pushed while training; `grpo export RUN --push org/name` does it afterwards"
_QUANT = "`model.quantization` knows bitsandbytes' 4bit and 8bit"
_LOADING = "how axolotl loads weights; transformers decides here"
_TRACKING = "set the tracker's own environment variables"
_FOLDER = "every run gets a folder of its own, `grpo train --runs DIR` says where"

DROPPED: dict[str, str] = {
    "sequence_len": (
        "GRPO has a length for each part: `dataset.max_prompt_length` and "
        "`generation.max_completion_length`"
    ),
    "output_dir": _FOLDER,
    "dataset_prepared_path": "nothing is prepared beforehand",
    "resume_from_checkpoint": "`grpo train --resume` goes on with a run",
    "auto_resume_from_checkpoints": "`grpo train --resume` goes on with a run",
    "remove_unused_columns": "rewards need the columns",
    "default_system_message": "set `dataset.prompt.system`",
    "xformers_attention": "transformers has no such kernel; set `model.attn_implementation`",
    "s2_attention": "transformers has no such kernel; set `model.attn_implementation`",
    "batch_size": "`micro_batch_size` and `gradient_accumulation_steps` are given too",
    "early_stopping_patience": "`val_set_size` holds nothing out, so nothing is evaluated",
    "include_tokens_per_second": "removed from transformers",
    "save_safetensors": "removed from transformers; checkpoints are always safetensors",
    "auto_find_batch_size": "GRPO refuses it; lower `training.per_device_train_batch_size`",
    "plugins": "code of axolotl's",
    "trainer_cls": "code of axolotl's",
    "strict": "unknown keys are always errors in a recipe",
    "rollout_func": "recipes have no rollouts of one's own",
    "group_by_length": "removed from transformers; GRPO draws its prompts itself",
    "optim_args": "should be a mapping or a text",
    "shuffle_merged_datasets": "set `training.shuffle_dataset`",
    "debug": "axolotl's own",
    "lora_model_dir": "recipes start a new adapter; merge the old one first, with `grpo export`",
    "lora_target_parameters": "recipes put adapters on modules alone",
    "peft": "of peft's settings a recipe has those of `model.lora`",
    "cosine_constant_lr_ratio": "no scheduler of transformers has it",
    "lr_groups": "one learning rate holds for all weights",
    **dict.fromkeys(
        """special_tokens tokens added_tokens_overrides tokenizer_type tokenizer_config
        tokenizer_use_fast tokenizer_legacy tokenizer_use_mistral_common tokenizer_save_jinja_files
        resize_token_embeddings_to_32x mean_resizing_embeddings shrink_embeddings""".split(),
        _TEXTS,
    ),
    **dict.fromkeys(
        """train_on_inputs sample_packing eval_sample_packing pad_to_sequence_len min_sample_len
        sample_packing_group_size sample_packing_bin_size sample_packing_sequentially batch_flattening
        multipack_real_batches curriculum_sampling excess_length_strategy eval_table_size eval_max_new_tokens
        do_causal_lm_eval eval_causal_lm_metrics do_bench_eval fix_untrained_tokens rl_beta_dpo
        chat_template_kwargs_sft""".split(),
        _SUPERVISED,
    ),
    **dict.fromkeys(
        """dataset_processes dataset_num_proc dataset_shard_num dataset_shard_idx skip_prepare_dataset
        dataset_exact_deduplication dataset_keep_in_memory push_dataset_to_hub streaming
        hf_use_auth_token preprocess_iterable""".split(),
        _ROWS,
    ),
    **dict.fromkeys(
        """model_type base_model_config cls_model_config processor_type low_cpu_mem_usage device_map max_memory
        gpu_memory_limit device experimental_skip_move_to_device overrides_of_model_config
        overrides_of_model_kwargs model_quantization_config model_quantization_config_kwargs use_kernels
        is_falcon_derived_model is_llama_derived_model is_mistral_derived_model
        is_qwen_derived_model lora_on_cpu qlora_sharded_model_loading""".split(),
        _LOADING,
    ),
    **dict.fromkeys(
        """liger_rope liger_rms_norm liger_glu_activation liger_layer_norm liger_cross_entropy
        liger_fused_linear_cross_entropy lora_mlp_kernel lora_qkv_kernel lora_o_kernel
        flash_attn_cross_entropy flash_attn_rms_norm flash_attn_fuse_qkv flash_attn_fuse_mlp
        flash_optimum unsloth_cross_entropy_loss unsloth_lora_mlp unsloth_lora_qkv unsloth_lora_o
        unsloth_rms_norm unsloth_rope fp8 fp8_enable_fsdp_float8_all_gather cut_cross_entropy""".split(),
        _KERNELS,
    ),
    **dict.fromkeys("hub_model_id hub_strategy hub_revision hub_private_repo".split(), _HUB),
    **dict.fromkeys("gptq bnb_config_kwargs loftq_config qat quantization".split(), _QUANT),
    **dict.fromkeys(
        """wandb_project wandb_entity wandb_watch wandb_log_model wandb_mode wandb_run_id
        mlflow_tracking_uri mlflow_experiment_name hf_mlflow_log_artifacts comet_api_key
        comet_workspace comet_project_name comet_experiment_key comet_mode comet_online
        comet_experiment_config""".split(),
        _TRACKING,
    ),
    **dict.fromkeys(
        """peft_layers_to_transform peft_layers_pattern peft_layer_replication peft_init_lora_weights
        peft_trainable_token_indices peft_ensure_weight_tying peft_autocast_adapter_dtype
        lora_fan_in_fan_out loraplus_lr_ratio loraplus_lr_embedding merge_lora merge_method relora
        relora_prune_ratio relora_prune_method relora_cpu_offload jagged_restart_steps""".split(),
        "of peft's settings a recipe has those of `model.lora`",
    ),
    **dict.fromkeys(
        """gc_steps loss_watchdog_threshold loss_watchdog_patience profiler_steps profiler_steps_start
        save_first_step world_size local_rank ddp accelerator_config fsdp_final_state_dict_type
        sequence_parallel_degree context_parallel_size tensor_parallel_size dp_shard_size
        dp_replicate_size heads_k_stride ray_num_workers use_ray axolotl_config_path""".split(),
        "axolotl's own; `launch` says how processes are started",
    ),
}
"""Top-level keys without a place, and why."""

TRL_DROPPED: dict[str, str] = {
    "rollout_func": "recipes have no rollouts of one's own",
    "reward_processing_classes": "a reward model brings its own tokenizer",
    "reward_num_workers": "rewards with a limit (`timeout_s`) run in processes of their own",
    "num_completions_to_print": "completions go to the run folder",
    "vllm_lora_sync": "TRL hands over merged weights",
    "vllm_sync_interval": "TRL hands over weights whenever they changed",
    "vllm_dtype": "removed from TRL; vLLM samples in the precision of training",
    "vllm_enable_prefix_caching": "removed from TRL; vLLM decides",
    **dict.fromkeys(
        """use_data_producer async_prefetch prefetch_depth streaming_partial_batch streaming_min_groups
        skip_zero_advantage_batches replay_buffer_size replay_recompute_logps reroll_start_fraction
        reroll_max_groups scope_rl scope_target_entropy scope_alpha
        scope_positive_threshold""".split(),
        _ASYNC,
    ),
}
"""Keys of the section `trl` without a place, and why."""

SERVER_FLAGS: dict[str, str] = {
    "enable_prefix_caching": "enable-prefix-caching",
    "enforce_eager": "enforce-eager",
    "reasoning_parser": "reasoning-parser",
}
"""Keys of the section `vllm` that are flags of the server."""
SERVER_DROPPED: dict[str, str] = {
    "device": "`grpo train` gives the server the last visible GPUs",
    "dtype": "vLLM samples in the precision of training",
    "data_parallel_size": "`grpo train` starts one server; `tensor_parallel_size` spreads it",
    "enable_reasoning": "removed from vLLM",
    "serve_module": "axolotl's own server; `grpo train` starts vLLM's",
    "worker_extension_cls": "axolotl's own server; `grpo train` starts vLLM's",
}
"""Keys of the section `vllm` without a place, and why."""
