"""Vectors of NVFP4 and their checker, which needs NumPy alone: README.md."""
