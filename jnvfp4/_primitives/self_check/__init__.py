"""Known-answer tests of kernels on devices like which none has run them."""
