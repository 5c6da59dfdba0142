"""Python runs this file first in every process below ``odc exec``. ODC starts when the process makes its process group.

``odc exec`` puts this file as ``sitecustomize.py`` into a folder on PYTHONPATH, where Python finds it at startup. So
the file imports only the standard library, and loads nothing in a process that is not a rank. Every rank calls
``torch.distributed.init_process_group``, whether the rank runs a script or a function, and whatever has started it.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

OPTIONS = "_ODC_EXEC_OPTIONS"
"""The options of ``odc run`` for the ranks, as a shell has them."""
_MODULE = "torch.distributed.distributed_c10d"
_FOLDER = os.path.dirname(os.path.abspath(__file__))


class WithGroups(importlib.abc.MetaPathFinder):
    """Finds torch's module of process groups as Python would, and changes it once it is loaded."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: object = None) -> Any:
        """As of any finder; of all other modules it knows nothing."""
        spec = importlib.machinery.PathFinder.find_spec(name, path) if name == _MODULE else None
        if spec is not None and spec.loader is not None:
            sys.meta_path.remove(self)
            load = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                load(module)
                begin_with_group(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def begin_with_group(module: Any) -> None:
    """Have ``init_process_group`` begin what ``odc run`` does around a script, and ``destroy_process_group`` end it."""
    make, destroy = module.init_process_group, module.destroy_process_group
    ends: list[Callable[[], object]] = []

    @functools.wraps(make)
    def init_process_group(*args: Any, **kwargs: Any) -> None:
        make(*args, **kwargs)
        from odc.launch.main import begin

        ends.append(begin(shlex.split(os.environ.get(OPTIONS, ""))))
        with open(os.path.join(_FOLDER, f"rank{module.get_rank()}"), "w"):
            pass  # for `odc exec` to see

    @functools.wraps(destroy)
    def destroy_process_group(group: Any = None) -> None:
        while ends and (group is None or group is module.GroupMember.WORLD):
            ends.pop()()
        destroy(group)

    module.init_process_group, module.destroy_process_group = init_process_group, destroy_process_group


def enter() -> None:
    """Wait for a process group, and let another ``sitecustomize``, which this one hides, run."""
    sys.meta_path.insert(0, WithGroups())
    others = [path for path in sys.path if os.path.abspath(path) != _FOLDER]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        module = sys.modules["sitecustomize"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


if __name__ == "sitecustomize":
    enter()
