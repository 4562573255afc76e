"""Known-answer tests of kernels on GPU architectures that they never ran on."""
