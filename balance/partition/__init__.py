"""Split items into parts of similar total cost."""

from odc.balance.partition.differencing import Parts
from odc.balance.partition.exact import ExactPartition, exact_partition
from odc.balance.partition.kway import karmarkar_karp, split_beside, split_by_cost

__all__ = ["ExactPartition", "Parts", "exact_partition", "karmarkar_karp", "split_beside", "split_by_cost"]
