"""Decides what a conversion does to every tensor, quantizes the tensors and writes the shards."""
