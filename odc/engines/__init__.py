"""Who moves and adds bytes: plain torch on a CPU, streams and kernels on a GPU."""
