"""Layers: quantized products with gradients, their keys, and where their weights are gathered."""
