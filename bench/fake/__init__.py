"""Devices without a GPU: streams, hardware queues and handles, on host memory."""
