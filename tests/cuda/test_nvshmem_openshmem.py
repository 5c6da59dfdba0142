"""Layer 3. The ``nvshmem`` transport on a real OpenSHMEM, that of Open MPI, on host memory.

Ranks are processes that ``oshrun`` starts. Each runs the conformance suite and the minibatch protocol on streams
(``openshmem_program.py``), with ranks that pose as hosts and with all on one: on a heap whose operations are calls of
the library (``openshmem_heap.py``), and on the real heap with interpreted kernels (``openshmem_kernels.py``). Then
something is left out, and the same checks must fail.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import openshmem_heap
import pytest

pytestmark = [
    pytest.mark.extended,
    pytest.mark.skipif(openshmem_heap.why_not() is not None, reason=str(openshmem_heap.why_not())),
]
_LIMIT_S = 240
CONFORMANCE = Path(__file__).parents[1] / "transports"  # whose tests the program runs


def run(
    folder: Path, num_ranks: int, parts: str, broken: str = "", heap: str = "direct"
) -> tuple[list[dict[str, Any]], str]:
    """What each rank has written that came to its end, and what the job has said."""
    program = Path(openshmem_heap.__file__).with_name("openshmem_program.py")
    launch = [str(openshmem_heap.launcher()), "-n", str(num_ranks), "--oversubscribe", "--bind-to", "none"]
    done = subprocess.run(
        [*launch, sys.executable, str(program), str(folder), heap, parts, broken],
        env=openshmem_heap.launch_environment() | {"PYTHONPATH": str(CONFORMANCE)},
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
        check=False,
    )
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    return found, f"{done.returncode}: {done.stdout[-2000:]} {done.stderr[-2000:]}"


DIRECT = {"shmem_putmem_nbi", "shmem_quiet", "shmem_getmem", "shmem_long_atomic_add", "shmem_ptr", "shmem_long_test"}
KERNELS = {"_nvshmem_gather_kernel", "_nvshmem_put_signal_kernel", "_nvshmem_order_kernel", "shmem_long_atomic_set"}


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("heap", ["direct", "kernels"])
def test_the_transport_and_the_protocol_hold_on_it(heap: str, num_ranks: int, tmp_path: Path) -> None:
    found, output = run(tmp_path, num_ranks, "conformance,protocol", heap=heap)
    assert [rank["error"] for rank in found] == [None] * num_ranks, (found, output)
    assert output.startswith("0:"), output
    first = found[0]["passed"]
    assert all(rank["passed"] == first for rank in found)
    assert len([name for name in first if name.startswith("far")]) >= 16
    assert len([name for name in first if name.startswith("near")]) >= 24
    for rank in found:
        assert DIRECT | (KERNELS if heap == "kernels" else set()) <= set(rank["calls"])


@pytest.mark.parametrize(
    ("heap", "broken", "words"),
    [
        ("direct", "no add", "Violation: rank"),
        ("direct", "no wait", "Violation: rank"),
        ("direct", "late put", "was not read back"),  # by set-up's own test of the memory
        ("kernels", "no quiet after a put", "was not read back"),
        ("kernels", "no quiet in kernels", "was not read back"),
    ],
)
def test_what_is_left_out_is_noticed(heap: str, broken: str, words: str, tmp_path: Path) -> None:
    found, output = run(tmp_path, 2, "far protocol", broken, heap)
    assert found, output
    assert all(rank["error"] is not None for rank in found), found
    assert any(words in rank["error"] for rank in found), found
