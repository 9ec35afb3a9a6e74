"""Where a model comes from and how it is loaded: paths, folder checks, tokenizer, weights, adapters, sizes."""
