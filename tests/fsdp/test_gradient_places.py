"""Layer 1: no processes. Every function of torch that reads or writes a gradient of a parameter is one that is known
here, with what it is to a session: so that a new torch, or a look that was too short, leaves none of them out."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest
import torch

from odc.fsdp_patch import fsdp1
from odc.fsdp_patch.compat import torch_version
from odc.fsdp_patch.interception import _INTERCEPTED

TORCH = Path(torch.__file__).parent
GRADIENTS = {"grad", "main_grad", "_saved_grad_shard", "_cpu_grad", "unsharded_accumulated_grad"}
"""Attributes; the last three are where FSDP keeps a gradient beside ``.grad``."""
ELSEWHERE = ("testing/*", "_inductor/*", "_dynamo/*", "_functorch/*", "_subclasses/*", "jit/*", "overrides.py")
"""Tests, compilers and what they trace. Compiled scripts call what is known here, see [Note: Compiled scripts] in
``interception.py``."""
KNOWN = {
    # FSDP1, where the methods of its handle that a session enters do not say it
    "distributed/fsdp/_flat_param.py:*._use_sharded_flat_param": "looks whether it holds an unsharded one",
    "distributed/fsdp/_flat_param.py:*.sharded_grad": "asked for by methods that are entered",
    "distributed/fsdp/_flat_param.py:*.init_flat_param_attributes": "CPU offload, which is refused",
    "distributed/fsdp/_runtime_utils.py:_p*": "in forward and backward, around the entered methods",
    "distributed/fsdp/_runtime_utils.py:*_grad*": "in backward, around the hook that pushes; NO_SHARD is left to FSDP1",
    "distributed/fsdp/_runtime_utils.py:*_hook": "in forward and backward",
    "distributed/fsdp/_unshard_param_utils.py:_writeback_to_local_shard": "inside `summon_full_params`",
    "distributed/fsdp/_init_utils.py:*": "before a model is patched",
    "distributed/fsdp/fully_sharded_data_parallel.py:_get_grad_norm": "inside `clip_grad_norm_`",
    # FSDP2
    "distributed/fsdp/_fully_shard/*": "in backward: gradients of full parameters; what the reduction adds is nothing",
    # What reads a gradient behind something that is entered by name
    "optim/lbfgs.py:*": "refused",
    "optim/*:*._init_group": "inside `optimizer.step`",
    "optim/sparse_adam.py:SparseAdam.step": "inside `optimizer.step`",
    "distributed/optim/optimizer.py:*": "gradients of RPC's distributed autograd",
    "distributed/optim/named_optimizer.py:*": "zeros of its own, used by `optimizer.step`",
    "distributed/optim/apply_optimizer_in_backward.py:*": "called by the unit, see `steps_in_backward`",
    "nn/utils/clip_grad.py:*": "entered",
    # What uses its data, or asks only whether there is one
    "amp/grad_scaler.py:*._unscale_grads_": "uses its data",
    "distributed/fsdp/sharded_grad_scaler.py:*._unscale_grads_": "uses its data",
    "nn/modules/module.py:Module._apply": "moves it: under FSDP1 that of the flat parameter",
    "_tensor.py:Tensor.__deepcopy__": "uses its data",
    "distributed/pipelining/*": "uses its data (`scale_grads`), or sees activations",
    "distributed/algorithms/model_averaging/utils.py:*": "asks whether there is one",
    "distributed/checkpoint/state_dict.py:_init_optim_state": "entered",
    # What is not for parameters of FSDP
    "distributed/algorithms/ddp_comm_hooks/*": "DDP",
    "nn/parallel/*": "DDP",
    "distributed/_tools/*": "measures memory without communication",
    "distributed/_shard/*": "sharded tensors of before FSDP",
    "utils/checkpoint.py:*": "activations",
}


def uses(path: Path) -> Iterator[str]:
    """The functions of a file that read or write a gradient, by ``getattr`` too."""
    name = path.relative_to(TORCH).as_posix()
    todo: list[tuple[ast.AST, str]] = [(ast.parse(path.read_bytes()), "")]
    while todo:
        node, scope = todo.pop()
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            scope = f"{scope}.{node.name}".lstrip(".")
        called = node.args[1:2] if isinstance(node, ast.Call) else []
        is_by_name = any(isinstance(one, ast.Constant) and one.value in GRADIENTS for one in called)
        is_other = isinstance(node, ast.Attribute) and ast.unparse(node.value).endswith("autograd")  # autograd.grad()
        if is_by_name or (isinstance(node, ast.Attribute) and node.attr in GRADIENTS and not is_other):
            yield f"{name}:{scope}"
        todo += [(child, scope) for child in ast.iter_child_nodes(node)]


def entered_of_handle() -> set[str]:
    """The methods of FSDP1's handle that a unit enters."""
    tree = ast.parse(Path(fsdp1.__file__).read_text())
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "shadow"]
    return {str(word.arg) for call in calls if ast.unparse(call.args[0]) == "self.handle" for word in call.keywords}


def all_uses() -> set[str]:
    """In torch, but not elsewhere."""
    attribute = re.compile(rb"(?:\.|['\"])(?:%s)\b" % "|".join(GRADIENTS).encode())
    names = {path: path.relative_to(TORCH).as_posix() for path in TORCH.rglob("*.py")}
    searched = [path for path, name in names.items() if not any(fnmatch(name, pattern) for pattern in ELSEWHERE)]
    return {one for path in searched if attribute.search(path.read_bytes()) for one in uses(path)}


def unknown(found: set[str], handle: set[str]) -> list[str]:
    """Of these uses, those that are neither in KNOWN nor in something that is entered."""
    entered = {f"FlatParamHandle.{name}*" for name in handle} | {one.name for one in _INTERCEPTED}
    known = [*KNOWN, *(f"*:{name}" for name in entered)]
    return sorted(one for one in found if not any(fnmatch(one, pattern) for pattern in known))


@pytest.mark.skipif(torch_version() < (2, 13), reason="each torch is searched while it is the newest one")
def test_every_use_of_a_gradient_in_torch_is_known() -> None:
    found, handle = all_uses(), entered_of_handle()
    assert unknown(found, handle) == []
    name = "FlatParamHandle.unshard_grad"
    assert unknown(found, handle - {"unshard_grad"}) == [f"distributed/fsdp/_flat_param.py:{name}"]
    unused = {pattern for pattern in KNOWN if not any(fnmatch(one, pattern) for one in found)}
    assert unused == set()
