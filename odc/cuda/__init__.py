"""What ODC asks of CUDA: exportable memory, stream memory operations, kernels. Imports neither cupy nor a driver."""
