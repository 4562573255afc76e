"""Reads and writes the files of a checkpoint: bytes on disk, whatever they mean."""
