"""What a GPU does with `grpo` and with plain TRL, measured within ten minutes: `make gpu-kit` packs it."""
