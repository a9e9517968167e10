"""GGUF files: their header, weights and tokenizer, and the configuration and the places of weights of each family."""
