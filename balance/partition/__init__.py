"""Split items into parts of similar total cost."""

from odc.balance.partition.exact import ExactPartition, exact_partition
from odc.balance.partition.kway import balance, karmarkar_karp

__all__ = ["ExactPartition", "balance", "exact_partition", "karmarkar_karp"]
