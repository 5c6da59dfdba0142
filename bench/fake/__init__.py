"""Stand-ins for a GPU on host memory: streams, hardware queues and memory handles."""
