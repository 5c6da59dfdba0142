"""Devices without a GPU: streams, hardware queues, handles and a symmetric heap, on host memory."""
