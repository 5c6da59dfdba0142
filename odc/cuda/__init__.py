"""ODC's interface to CUDA: exportable memory, stream memory operations, kernels. Importing it loads neither cupy nor a
driver."""
