"""Copy and accumulate kernels: what moves and adds the bytes, and nothing about who may move them when.

On the host: ``chunked``. On a GPU, by Triton (imported when one of these modules is): ``parts`` reads and writes peers'
memory, and adds to it: it gathers into one parameter or all of a unit, and pushes out of as many gradients;
``accumulate`` adds to sums here, ``slots`` adds all pushes that have arrived, ``fill`` fills, copies and casts; each
kernel `_x_kernel` has a launcher and a plain-torch twin `x_reference`. Between hosts: ``nvshmem``. ``prepare`` compiles
and loads beforehand what steps launch; ``python -m odc.kernels.aot`` compiles all, without a GPU.
"""

from odc.kernels.chunked import CHUNK_BYTES, add_chunked, copy_chunked, zero_chunked

__all__ = ["CHUNK_BYTES", "add_chunked", "copy_chunked", "zero_chunked"]
