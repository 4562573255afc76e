"""What runs where, and how far quantized values are from the originals."""
