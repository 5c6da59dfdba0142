"""Every name of CUDA's libraries that this project uses: a table, and what finds them in the source.

No machine of CI has these libraries' hardware, so a name that a version does not have would be met by its user first.
``test_cuda_names.py`` compares the table with the source, and (extended) with the oldest and the newest wheels that
``pyproject.toml`` allows.

The source is read by following names: ``import cupy``, ``from cuda.core import Device``,
``ctypes.CDLL("libcuda.so.1")``, and what is assigned from these. Names count for their whole file; a function's result
is its name, too: ``Device(0).set_current`` is ``cuda.core.Device.set_current``.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from pins import ROOT

FILES = ("odc/cuda/*.py", "cli/doctor/*.py", "kernels/*.py", "kernels/nvshmem/*.py")
LIBRARIES = ("cupy", "nvshmem", "cuda", "libcuda", "libnvidia-ml", "libnvshmem_host")

NAMES: dict[str, tuple[str, ...] | int | None] = {
    "cupy.cuda.MemoryPointer": 2,
    "cupy.cuda.UnownedMemory": 4,
    "cupy.cuda.runtime.deviceCanAccessPeer": 2,
    "cupy.cuda.runtime.deviceGetAttribute": 2,
    "cupy.cuda.runtime.deviceGetByPCIBusId": 1,
    "cupy.cuda.runtime.deviceGetPCIBusId": 1,
    "cupy.cuda.runtime.deviceSynchronize": 0,
    "cupy.cuda.runtime.driverGetVersion": 0,
    "cupy.cuda.runtime.free": 1,
    "cupy.cuda.runtime.getDeviceCount": 0,
    "cupy.cuda.runtime.hostRegister": 3,
    "cupy.cuda.runtime.hostUnregister": 1,
    "cupy.cuda.runtime.ipcCloseMemHandle": 1,
    "cupy.cuda.runtime.ipcGetMemHandle": 1,
    "cupy.cuda.runtime.ipcOpenMemHandle": 1,
    "cupy.cuda.runtime.malloc": 1,
    "cupy.cuda.runtime.memGetInfo": 0,
    "cupy.cuda.runtime.memset": 3,
    "cupy.cuda.runtime.setDevice": 1,
    "cupy.ndarray": ("dtype", "memptr"),
    "cuda.core.Device": 1,
    "cuda.core.Device.set_current": None,
    "nvshmem.bindings.Cmp_type.CMP_GE": None,
    "nvshmem.bindings.Init_status.STATUS_IS_BOOTSTRAPPED": None,
    "nvshmem.bindings.Init_status.STATUS_FULL_MPG": None,
    "nvshmem.bindings.Init_status.STATUS_IS_INITIALIZED": None,
    "nvshmem.bindings.Init_status.STATUS_LIMITED_MPG": None,
    "nvshmem.bindings.Signal_op.SIGNAL_ADD": None,
    "nvshmem.bindings.cumodule_init": 1,
    "nvshmem.bindings.init_status": 0,
    "nvshmem.bindings.my_pe": 0,
    "nvshmem.bindings.n_pes": 0,
    "nvshmem.bindings.ptr": 2,
    "nvshmem.bindings.signal_op_on_stream": 5,
    "nvshmem.bindings.signal_wait_until_on_stream": 4,
    "nvshmem.core.get_unique_id": ("empty",),
    "nvshmem.core.get_version": 0,
    "nvshmem.core.init": ("device", "uid", "rank", "nranks", "initializer_method"),
    "libcuda.cuDeviceGetP2PAttribute": 4,
    "libcuda.cuGetErrorString": 2,
    "libcuda.cuMemGetAddressRange_v2": 3,
    "libcuda.cuMemHostGetDevicePointer_v2": 3,
    "libcuda.cuMemcpyAsync": 4,
    "libcuda.cuMemcpyBatchAsync": 9,
    "libcuda.cuStreamBatchMemOp_v2": 4,
    "libcuda.cuStreamCreateWithPriority": 3,
    "libnvidia-ml.nvmlDeviceGetCount_v2": 1,
    "libnvidia-ml.nvmlDeviceGetCudaComputeCapability": 3,
    "libnvidia-ml.nvmlDeviceGetHandleByIndex_v2": 2,
    "libnvidia-ml.nvmlDeviceGetHandleByPciBusId_v2": 2,
    "libnvidia-ml.nvmlDeviceGetMemoryInfo": 2,
    "libnvidia-ml.nvmlDeviceGetMigMode": 3,
    "libnvidia-ml.nvmlDeviceGetName": 3,
    "libnvidia-ml.nvmlDeviceGetP2PStatus": 4,
    "libnvidia-ml.nvmlInit_v2": 0,
    "libnvidia-ml.nvmlShutdown": 0,
    "libnvidia-ml.nvmlSystemGetCudaDriverVersion_v2": 1,
    "libnvidia-ml.nvmlSystemGetDriverVersion": 2,
    "libnvshmem_host.nvshmem_calloc": 2,
}
"""What each is called with: that many arguments by position, or these by name; None: it is not called."""

_PASSING = ("_call", "together")  # they call what they are given; the first with the arguments behind it
_OPAQUE = ("_data", "argtypes", "restype")  # what is behind these is numpy's or ctypes'


class Names(ast.NodeVisitor):
    """The names that one file uses, and with what: ``found`` has one entry per call."""

    def __init__(self, source: str) -> None:
        self.found: dict[str, set[tuple[str, ...] | int | None]] = {}
        self._tree = ast.parse(source)
        self._known: dict[str, str] = {}
        while not self._is_settled():
            continue
        self.visit(self._tree)

    def _is_settled(self) -> bool:
        before = dict(self._known)
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Import):
                self._known |= {a.asname or a.name.split(".")[0]: a.name.split(".")[0] for a in node.names}
            elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in LIBRARIES:
                self._known |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            elif isinstance(node, (ast.Assign, ast.AnnAssign)):
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    self._assign(target, node.value)
            elif isinstance(node, ast.FunctionDef):
                for returned in ast.walk(node):
                    if isinstance(returned, ast.Return):
                        self._assign(ast.Name(node.name), returned.value)
        self._known = {name: path for name, path in self._known.items() if path.split(".")[0] in LIBRARIES}
        return self._known == before

    def _assign(self, target: ast.expr, value: ast.expr | None) -> None:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            for one, other in zip(target.elts, value.elts, strict=True):
                self._assign(one, other)
        elif isinstance(value, ast.Constant) and str(value.value).startswith("lib") and ".so" in str(value.value):
            self._known.setdefault(ast.unparse(target), f"{str(value.value).partition('.so')[0]}.so")
        elif value is not None and (path := self.path(value)) is not None:
            self._known.setdefault(ast.unparse(target), path.replace(".so", ""))

    def path(self, node: ast.expr) -> str | None:
        """The dotted name of an expression, from a library on; None: it is of none."""
        if ast.unparse(node) in self._known:
            return self._known[ast.unparse(node)]
        if isinstance(node, ast.Attribute):
            base = self.path(node.value)
            return None if base is None else base if base.endswith(_OPAQUE) else f"{base}.{node.attr}"
        if isinstance(node, ast.Call):
            function, arguments = ast.unparse(node.func), node.args
            if function in ("ctypes.CDLL", "load") and arguments:
                return self._library(arguments[0])
            if function == "together" and isinstance(arguments[-1], ast.Lambda):
                return self.path(arguments[-1].body)
            return self.path(node.func)
        return None

    def _library(self, name: ast.expr) -> str | None:
        text = name.value if isinstance(name, ast.Constant) else self._known.get(ast.unparse(name))
        return str(text).partition(".so")[0] if text else None

    def _note(self, node: ast.expr, how: tuple[str, ...] | int | None) -> None:
        path = self.path(node)
        if path is not None and "." in path and not path.endswith((".so", *_OPAQUE[1:])):
            self.found.setdefault(path, set()).add(how)

    def visit_Call(self, node: ast.Call) -> None:
        name = ast.unparse(node.func).rpartition(".")[2]
        if name in _PASSING and node.args:
            passed = node.args[0] if name == "_call" else node.args[-1]
            self._note(passed, len(node.args) - 1 if name == "_call" else None)
            self._visit_below(passed, *node.args)
        elif name == "_call_driver" and isinstance(node.args[0], ast.Constant):
            self.found.setdefault(f"libcuda.{node.args[0].value}", set()).add(len(node.args) - 1)
        elif self.path(node.func) is not None:
            keywords = tuple(keyword.arg or "**" for keyword in node.keywords)
            self._note(node.func, keywords or len(node.args))
            self._visit_below(node.func, *node.args, *(keyword.value for keyword in node.keywords))
        else:
            self.generic_visit(node)

    def _visit_below(self, noted: ast.expr, *others: ast.expr) -> None:
        for part in (*ast.iter_child_nodes(noted), *(other for other in others if other is not noted)):
            if not (isinstance(part, ast.Attribute) and part in ast.walk(noted)):
                self.visit(part)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self._note(node, None)
        if self.path(node) is None or isinstance(node.value, ast.Call):
            self.generic_visit(node)


def sources() -> Iterator[Path]:
    for pattern in FILES:
        yield from sorted(ROOT.glob(pattern))


def used() -> dict[str, set[tuple[str, ...] | int | None]]:
    """What the source uses: by name, how it is called (None where it is only named)."""
    found: dict[str, set[tuple[str, ...] | int | None]] = {}
    for path in sources():
        for name, calls in Names(path.read_text()).found.items():
            found.setdefault(name, set()).update(calls)
    modules = {name for name in found if any(other.startswith(f"{name}.") for other in found)}
    calls = {name: {how for how in found[name] if how is not None} for name in found}
    return {name: calls[name] for name in found if name not in modules or calls[name]}
