"""Values and rules: the quantized tensor, its form for stores, IEEE arithmetic in integers, path patterns."""
