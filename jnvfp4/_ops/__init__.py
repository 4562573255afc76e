"""The operations on one tensor or product, with the checks of their arguments."""
