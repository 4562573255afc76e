"""Placeholder for haliax."""
