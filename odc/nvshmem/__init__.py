"""What ODC asks of NVSHMEM: a symmetric heap, transfers and signals on streams. Imports neither nvshmem nor triton."""
