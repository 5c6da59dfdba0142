"""Configuration: one frozen dataclass, and the only place that reads environment variables.

Precedence: an environment variable overrides the argument, and the argument overrides the default. So a limit can be
changed without editing the script.
"""

from __future__ import annotations

import ipaddress
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from odc.errors import ConfigError, shown

TIMEOUT = "ODC_TIMEOUT"  # seconds without progress after which a wait fails
FAULT = "ODC_FAULT"  # fault injection, see odc/liveness/faults.py
HOST_ID = "ODC_HOST_ID"  # pretend to be another host (tests)
ADDRESS = "ODC_ADDRESS"  # where ranks of other hosts reach those of this one
TRANSFERS = "ODC_TRANSFER_TABLE"  # a file that says when a kernel beats copy engines
TRANSPORT = "ODC_TRANSPORT"  # overrides transport=
ACCUMULATE = "ODC_ACCUMULATE"  # overrides accumulate=
SHARE = "ODC_SHARE_IN_HOST"  # overrides share_in_host=
STAGING = "ODC_STAGING"  # "on": FSDP2 copies into flat buffers and out of them, as for collectives
NVSHMEM_HEAP = "NVSHMEM_SYMMETRIC_SIZE"  # set for NVSHMEM where its user has not
NVSHMEM_IBGDA = "NVSHMEM_IB_ENABLE_IBGDA"  # refused: GPUs that drive the network card themselves
CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"  # hardware queues that streams share; 8 unless it says otherwise

# Variables of other libraries, which ODC does not act on, but for what it refuses: ``odc doctor`` explains them.
FOREIGN = (
    "CC",
    CONNECTIONS,
    "CUDA_VISIBLE_DEVICES",
    "LOCAL_WORLD_SIZE",
    "NVSHMEM_HOME",
    NVSHMEM_IBGDA,
    "NVSHMEM_LIB_DIR",
    "NVSHMEM_SYMMETRIC_SIZE",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
)

ACCUMULATE_MODES = ("auto", "direct", "daemon")
SHARE_MODES = ("auto", "on", "off")
STAGING_MODES = ("auto", "on")
ACCUMULATE_DTYPES = (torch.float32, torch.float64)


@dataclass(frozen=True)
class RuntimeConfig:
    """Options of one runtime. They must be the same on every rank; set-up compares them.

    Example:
        >>> odc.RuntimeConfig(timeout_s=60.0).timeout_s
        60.0
        >>> odc.RuntimeConfig.from_environment(timeout_s=60.0, environ={"ODC_TIMEOUT": "30"}).timeout_s
        30.0
    """

    transport: str = "auto"
    """A transport's name, or your own class as "package.module:Class". "auto": the first that works for all ranks."""

    accumulate: str = "auto"
    """How gradients are added. "direct": every rank adds into the owners' accumulators. "daemon": a thread of each
    owner adds gradients that other ranks leave in slots. "auto": direct if all ranks share a host; on GPUs also only if
    all links have native atomics, gradients are not reduced in bfloat16, and no measured
    :class:`~odc.engines.base.TransferTable` says otherwise."""

    accumulate_dtype: torch.dtype = torch.float32
    """dtype of the accumulators: float32 or float64. Sums in a 16-bit dtype would depend on arrival order."""

    deterministic: bool = False
    """Gradients are the same in every run, bit for bit. Needs memory for one more full gradient per rank."""

    staging: str = "auto"
    """"auto": FSDP2's units are gathered directly into parameters and pushed directly from gradients where possible.
    "on": through FSDP2's flat buffers."""

    share_in_host: str | float = "auto"
    """For ranks on several hosts. "on": the ranks of a host share parameters and gradients, so that each crosses hosts
    once per step. "off": each rank reads from and adds to ranks of all hosts. A number: share only as many units as fit
    into this many bytes of a rank. "auto": as many as fit into half of its free memory; none where sharing is not
    possible."""

    timeout_s: float = 600.0
    """Seconds without progress of another rank before a wait raises."""

    fault: str = ""
    """Fault to inject, see :mod:`odc.liveness.faults`. May differ between ranks."""

    host_id: str = ""
    """Replaces the detected identity of the host if not empty. May differ between ranks."""

    transfer_table: str = ""
    """Path of a measured :class:`~odc.engines.base.TransferTable`; empty: the default one. May differ between
    ranks."""

    address: str = ""
    """This host's IP address in the network that all hosts share; empty: detected. May differ between ranks."""

    def __post_init__(self) -> None:
        if self.accumulate not in ACCUMULATE_MODES:
            raise _bad_option("accumulate", self.accumulate, f"one of {', '.join(ACCUMULATE_MODES)}")
        try:
            is_known = self.share_in_host in SHARE_MODES or float(self.share_in_host) >= 0
        except ValueError:
            is_known = False
        if not is_known:
            raise _bad_option("share_in_host", self.share_in_host, f"{', '.join(SHARE_MODES)} or a number of bytes")
        if self.staging not in STAGING_MODES:
            raise _bad_option("staging", self.staging, f"one of {', '.join(STAGING_MODES)}")
        if self.accumulate_dtype not in ACCUMULATE_DTYPES:
            raise _bad_option("accumulate_dtype", self.accumulate_dtype, "torch.float32 or torch.float64")
        if not (isinstance(self.timeout_s, (int, float)) and 0 < self.timeout_s < math.inf):
            raise _bad_option("timeout_s", self.timeout_s, "a number of seconds greater than 0")
        _check_address(self.address)

    @classmethod
    def from_environment(
        cls,
        *,
        transport: str = "auto",
        accumulate: str = "auto",
        accumulate_dtype: torch.dtype = torch.float32,
        deterministic: bool = False,
        share_in_host: str | float = "auto",
        timeout_s: float = 600.0,
        environ: Mapping[str, str] | None = None,
    ) -> RuntimeConfig:
        """The arguments, overridden by the ``ODC_*`` variables of ``environ`` (default: the process's own).

        Raises:
            ConfigError: a variable or an argument has a value that cannot be used.
        """
        env = os.environ if environ is None else environ
        return cls(
            transport=env.get(TRANSPORT, transport),
            accumulate=env.get(ACCUMULATE, accumulate),
            accumulate_dtype=accumulate_dtype,
            deterministic=deterministic,
            share_in_host=env.get(SHARE, share_in_host),
            staging=env.get(STAGING, "auto"),
            timeout_s=_read_seconds(env, TIMEOUT, timeout_s),
            fault=env.get(FAULT, ""),
            host_id=env.get(HOST_ID, ""),
            address=env.get(ADDRESS, ""),
            transfer_table=env.get(TRANSFERS, ""),
        )

    @property
    def most_shared_bytes(self) -> float | None:
        """The most bytes of a rank that :attr:`share_in_host` may use; None: depends on its memory."""
        known: dict[str | float, float | None] = {"auto": None, "on": math.inf, "off": 0.0}
        return known[self.share_in_host] if self.share_in_host in known else float(self.share_in_host)

    def shared(self) -> dict[str, str]:
        """As text, the options that must be the same on every rank."""
        return {
            "transport": self.transport,
            "accumulate": self.accumulate,
            "accumulate_dtype": str(self.accumulate_dtype),
            "deterministic": str(self.deterministic),
            "share_in_host": str(self.share_in_host),
            "staging": self.staging,
        }


@dataclass(frozen=True)
class LaunchEnvironment:
    """The variables that torchrun sets for each rank."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    """Of this host."""
    master_addr: str = ""
    master_port: int = 0
    agent_store: bool = False
    """Whether the key-value store lives in torchrun's own process, and so outlives the ranks."""
    attempt: str = "0"
    """Distinguishes restarts."""
    error_file: str = ""
    """The file in which torchrun looks for the error of a rank."""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> LaunchEnvironment:
        """From ``environ`` (default: the process's own); a process started without torchrun is rank 0 of 1.

        Raises:
            ConfigError: a variable has a value that torchrun would not set.
        """
        env = os.environ if environ is None else environ
        world_size = _read_integer(env, "WORLD_SIZE", 1, 1, None)
        return cls(
            rank=_read_integer(env, "RANK", 0, 0, world_size - 1),
            local_rank=_read_integer(env, "LOCAL_RANK", 0, 0, None),
            world_size=world_size,
            local_world_size=_read_integer(env, "LOCAL_WORLD_SIZE", world_size, 1, world_size),
            master_addr=env.get("MASTER_ADDR", ""),
            master_port=_read_integer(env, "MASTER_PORT", 0, 0, 65535),
            agent_store=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            attempt=env.get("TORCHELASTIC_RESTART_COUNT", "0"),
            error_file=env.get("TORCHELASTIC_ERROR_FILE", ""),
        )


def master_address() -> str:
    """Where torchrun's first host is, or ""."""
    return os.environ.get("MASTER_ADDR", "")


def nvshmem_folder() -> str | None:
    """The folder of NVSHMEM's libraries, ``NVSHMEM_LIB_DIR``, which torch uses, too; None if it is not set."""
    return os.environ.get("NVSHMEM_LIB_DIR") or None


def nvshmem_heap_bytes(environ: Mapping[str, str] | None = None) -> int | None:
    """The value of ``NVSHMEM_SYMMETRIC_SIZE`` in bytes; None if it is not set.

    Raises:
        ConfigError: it is not a number of bytes, with K, M, G or T behind it or not.
    """
    env = os.environ if environ is None else environ
    text = env.get(NVSHMEM_HEAP, "").strip()
    if not text:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)B?", text.upper())
    if match is None:
        raise _bad_option(NVSHMEM_HEAP, text, "a number of bytes, perhaps with K, M, G or T behind it")
    return int(float(match[1]) * 1024 ** " KMGT".index(match[2] or " "))


def set_nvshmem_heap_bytes(num_bytes: int) -> None:
    """Set the size of the heap that NVSHMEM allocates when it starts. NVSHMEM reads only its variables."""
    os.environ[NVSHMEM_HEAP] = str(num_bytes)


def ibgda_problem(environ: Mapping[str, str] | None = None) -> str | None:
    """Why ODC refuses NVSHMEM with the value of ``NVSHMEM_IB_ENABLE_IBGDA``, or None: it is off."""
    value = (os.environ if environ is None else environ).get(NVSHMEM_IBGDA)
    if value is None or value[:1].lower() in ("0", "n", "f"):  # NVSHMEM takes anything else for yes, also nothing
        return None
    return (
        f"{NVSHMEM_IBGDA}={shown(value)} lets GPUs drive the network card themselves (IBGDA), and the NVSHMEM device "
        "library that ODC's kernels are linked with has no code for that: nothing would wait for their puts, and "
        "gradients would be lost without an error"
    )


def connections_problem(environ: Mapping[str, str] | None = None) -> str | None:
    """Why the value of ``CUDA_DEVICE_MAX_CONNECTIONS`` makes independent streams of ODC wait for each other, or
    None."""
    value = (os.environ if environ is None else environ).get(CONNECTIONS, "")
    if not value.isdigit() or int(value) >= 8:
        return None
    return (
        f"{CONNECTIONS}={value} puts streams into {value} queue{'s' * (value != '1')}: gathers and pushes wait behind "
        "computation that has nothing to do with them. Megatron and Transformer Engine set it for their own order of "
        "kernels; without them unset it, or set 32"
    )


def foreign_variables(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Those of ``FOREIGN`` that are set in ``environ`` (default: the process's own)."""
    env = os.environ if environ is None else environ
    return {name: env[name] for name in FOREIGN if name in env}


def _read_seconds(env: Mapping[str, str], name: str, default: float) -> float:
    text = env.get(name)
    if text is None:
        return default
    try:
        return float(text)
    except ValueError:
        raise _bad_option(name, text, "a number of seconds") from None


def _read_integer(env: Mapping[str, str], name: str, default: int, least: int, most: int | None) -> int:
    text = env.get(name, str(default))
    expected = f"an integer of at least {least}" if most is None else f"an integer from {least} to {most}"
    try:
        value = int(text)
    except ValueError:
        raise _bad_option(name, text, expected) from None
    if value < least or (most is not None and value > most):
        raise _bad_option(name, text, expected)
    return value


def _check_address(text: str) -> None:
    if not text:
        return
    expected = (
        "the one IP address at which the other hosts reach this one, such as 10.0.0.7 (`ip -brief address` lists those "
        "of a host); or leave it out, and the address on the way to MASTER_ADDR is taken"
    )
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        raise _bad_option(ADDRESS, text, expected) from None
    if address.is_unspecified or address.is_multicast or str(address) == "255.255.255.255":
        raise _bad_option(ADDRESS, text, expected)


def _bad_option(option: str, value: object, expected: str) -> ConfigError:
    return ConfigError(f"{option}={shown(value)} cannot be used: expected {expected}")
