"""Decoding with a KV cache: the cache, attention of one new token of each sequence, and appending it."""

from ._ops.attention import KVCache as KVCache
from ._ops.attention import append_kv as append_kv
from ._ops.attention import decode_attention as decode_attention
