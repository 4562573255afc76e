"""The version of the package; a test holds it equal to that of pyproject.toml."""

__version__ = "0.1.0"
