"""Exact integer batch arithmetic of GRPO training and evaluation: numbers in, numbers out.

Owns the rules a batch must meet, the counts that follow from the settings, and the nearest values that
fix a broken rule.

- *prompt*: one row of the dataset; one question.
- *completion*: one answer sampled for a prompt. `per_device_train_batch_size` counts completions.
- *group*: the `num_generations` completions of one prompt; advantages compare within it.
- *micro-step*: one forward and backward pass on every process (`B·N` completions).
- *optimizer step*: one weight update, after `gradient_accumulation_steps` micro-steps; the last one
  of an epoch has fewer if they do not divide. Trainers report it as `global_step`.

Letters: `B` per-device batch, `N` processes, `A` gradient accumulation, `S` steps per generation
(default `A`), `G` generations per prompt, `I` iterations over each generation batch.

Source: TRL 1.16.0 `GRPOConfig.__post_init__` (rules), `GRPOTrainer.get_train_dataloader`,
`GRPOTrainer._get_train_sampler` and `RepeatSampler` (what an epoch holds), `_prepare_inputs` (when
sampling happens); transformers 5.17 `Trainer.set_initial_training_values` (steps); accelerate 1.15
`BatchSamplerShard` (how evaluation fills its last batch).
"""
