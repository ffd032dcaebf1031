"""GGUF files: llama.cpp's container of weights, sizes and tokenizer, read where it lies."""
