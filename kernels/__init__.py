"""Kernels that copy and add bytes. They know nothing of the protocol that decides when.

On the host: ``chunked``. On a GPU, with Triton (which these modules import): ``parts`` reads, writes and adds to other
ranks' memory: it gathers into one or all parameters of a unit, and pushes from their gradients. ``accumulate`` adds to
local sums, ``slots`` adds all pushes that have arrived, ``fill`` fills, copies and casts. Each kernel `_x_kernel` has a
launcher and a plain-torch twin `x_reference`. Between hosts: ``nvshmem``. ``prepare`` compiles and loads all kernels of
a step in advance; ``python -m odc.kernels.aot`` compiles all kernels without a GPU.
"""

from odc.kernels.chunked import CHUNK_BYTES, add_chunked, copy_chunked, zero_chunked

__all__ = ["CHUNK_BYTES", "add_chunked", "copy_chunked", "zero_chunked"]
