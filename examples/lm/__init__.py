"""The language model that examples and benchmarks share: sizes, text, layers, training and Hugging Face names."""
