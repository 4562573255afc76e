"""Placeholder for qwix."""
