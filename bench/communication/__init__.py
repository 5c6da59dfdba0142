"""What ODC's primitives cost: bandwidth, host time, memory."""
