"""Kernels that move data between hosts by NVSHMEM's device functions. Importing this imports no Triton.

``bitcode``: where NVSHMEM's device library is. ``modules``: what makes a loaded kernel able to use it. ``device``: its
functions as Triton sees them. ``transfer``: gather, and put with signal. ``signals``: quiet.

The device library of the supported release reaches PEs of the same host by loads and stores, and hands transfers
between hosts to NVSHMEM's proxy thread on the host; the GPU does not drive the network adapter itself (no IBGDA).
"""

from odc.kernels.nvshmem.bitcode import find_bitcode

__all__ = ["find_bitcode"]
