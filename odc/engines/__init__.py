"""Engines move and add bytes: with plain torch on a CPU, with streams and kernels on a GPU."""
