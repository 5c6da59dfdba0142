"""Copy and accumulate kernels: what moves and adds the bytes, and nothing about who may move them when."""

from odc.kernels.chunked import CHUNK_BYTES, add_chunked, copy_chunked, zero_chunked

__all__ = ["CHUNK_BYTES", "add_chunked", "copy_chunked", "zero_chunked"]
