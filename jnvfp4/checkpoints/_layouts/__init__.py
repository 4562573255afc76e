"""Describes how each checkpoint layout stores a quantized weight, and how loaders read it."""
