"""The compiled extensions: how they are found, what they plan, and the private corner of JAX."""
