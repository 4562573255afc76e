"""The language model that several examples share: its sizes, text, layers, training and Hugging Face names."""
