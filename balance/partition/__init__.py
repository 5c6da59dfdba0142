"""Split items into parts of similar total cost."""

from odc.balance.partition.kway import balance, karmarkar_karp

__all__ = ["balance", "karmarkar_karp"]
