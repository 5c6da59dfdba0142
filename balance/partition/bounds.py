"""Lower bounds of the makespan."""

from __future__ import annotations

import numpy as np

from odc.balance.checks import FloatArray


def lower_bound(costs: FloatArray, k: int, *, equal_size: bool = False, speeds: FloatArray | None = None) -> float:
    """A makespan below which no partition into ``k`` parts gets: the largest of some simple bounds.

    - All costs over all speeds (without speeds: the mean load).
    - The j largest items on the j fastest devices, for every j up to ``k`` (without speeds: the largest item).
    - Without speeds, the pigeonhole bound: some part holds at least j + 1 of the j * k + 1 largest items, so
      at least the j + 1 smallest of these.
    - With ``equal_size``, the largest item shares its part with at least the ``n / k - 1`` smallest.

    Never larger for ``k + 1`` equal devices than for ``k`` (with ``equal_size``: where both divide ``n``).
    """
    if costs.size == 0:
        return 0.0
    ordered = np.sort(costs)[::-1]
    sums = np.concatenate([[0.0], np.cumsum(ordered)])
    rates = np.sort(np.ones(k) if speeds is None else speeds)[::-1]
    num_first = min(k, costs.size)
    bounds = [float(sums[-1] / rates.sum()), float((sums[1 : num_first + 1] / np.cumsum(rates)[:num_first]).max())]
    if speeds is None:
        j = np.arange(1, (costs.size - 1) // k + 1)
        bounds.append(float((sums[j * k + 1] - sums[j * k - j]).max(initial=0.0)))
    if equal_size:
        num_others = costs.size // k - 1
        bounds.append(float((ordered[0] + sums[-1] - sums[costs.size - num_others]) / rates[0]))
    return max(bounds)
