"""All errors that ODC raises. Bad input raises a ``ValueError``; later failures raise an :class:`OdcError`.

Imports nothing of ODC. Every room uses :func:`shown` and :func:`shorten` to quote input in its messages.
"""

from __future__ import annotations

import reprlib


class OdcError(RuntimeError):
    """Base class of all run-time errors of ODC.

    Example:
        >>> session = odc.patch_fsdp(model)
        >>> session.close()
        >>> session.finish()
        Traceback (most recent call last):
            ...
        odc.errors.OdcError: this session is closed: ...
    """


class ConfigError(OdcError, ValueError):
    """An option or an environment variable has a value that ODC cannot use.

    Example:
        >>> odc.RuntimeConfig(accumulate="mail")
        Traceback (most recent call last):
            ...
        odc.errors.ConfigError: accumulate='mail' cannot be used: ...
    """


class SetupError(OdcError):
    """The ranks could not agree or connect during set-up; nothing was patched.

    Example:
        >>> odc.patch_fsdp(model, deterministic=rank == 1)
        Traceback (most recent call last):
            ...
        odc.errors.SetupError: rank 1 differs from rank 0 in options, item 'deterministic': ...
    """


class UnsupportedError(OdcError, NotImplementedError):
    """The model or the script uses something that ODC does not support; the message names it.

    Example:
        >>> from torch.distributed.fsdp import MixedPrecisionPolicy
        >>> other = build_model()
        >>> _ = fully_shard(other, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float16))
        >>> odc.patch_fsdp(other)
        Traceback (most recent call last):
            ...
        odc.errors.UnsupportedError: ... gradients are reduced in torch.float16 ...
    """


class ProtocolError(OdcError):
    """An operation came at the wrong point of the minibatch, or ranks differ in what they do.

    Example:
        >>> session = odc.patch_fsdp(model)
        >>> loss(model, minibatches[0][0]).backward()
        >>> session.finish() if rank == 0 else session.discard()
        Traceback (most recent call last):
            ...
        odc.errors.ProtocolError: ...
        >>> session.close()
    """


class MisuseError(ProtocolError):
    """An operation came at the wrong point of the minibatch, and was refused before it changed anything. This session
    and those of other ranks can go on.

    Example:
        >>> session = odc.patch_fsdp(model)
        >>> loss(model, minibatches[0][0]).backward()
        >>> session.publish()
        Traceback (most recent call last):
            ...
        odc.errors.MisuseError: publish() inside minibatch 1: ...
        >>> session.finish()
        >>> session.close()
    """


class PeerDiedError(OdcError):
    """The process of an awaited rank has ended.

    Example:
        >>> import os, signal
        >>> if rank == 1:  # session: of a patched model
        ...     os.kill(os.getpid(), signal.SIGKILL)
        >>> session.finish()
        Traceback (most recent call last):
            ...
        odc.errors.PeerDiedError: rank 0 waited ... for rank 1 ... is dead: killed by signal 9 (SIGKILL)
    """


class PeerClosedError(OdcError):
    """An awaited rank has closed its session.

    Example:
        >>> if rank == 1:  # session: of a patched model
        ...     session.close()
        >>> session.finish()
        Traceback (most recent call last):
            ...
        odc.errors.PeerClosedError: rank 0 waited ... for rank 1 ...
    """


class PeerSilentError(OdcError, TimeoutError):
    """An awaited rank is alive, but made no progress for the whole timeout.

    Example:
        >>> import time
        >>> session = odc.patch_fsdp(model, timeout_s=0.5)
        >>> if rank == 1:
        ...     time.sleep(5)
        >>> session.finish()
        Traceback (most recent call last):
            ...
        odc.errors.PeerSilentError: rank 0 waited ... for rank 1 ...
    """


class AbortedError(OdcError):
    """Another rank failed first; the message names the rank and its error.

    Example:
        >>> if rank == 1:  # session: of a patched model
        ...     session.abort(RuntimeError("out of memory"))
        >>> session.finish()
        Traceback (most recent call last):
            ...
        odc.errors.AbortedError: ...out of memory...
    """


class FaultInjected(OdcError):
    """Raised by a fault with ``do=raise``, only if ``ODC_FAULT`` is set."""


OUR_FAULT = "This is a fault of ODC itself: please report it with the whole message"
"""The end of the message of a check that fails only through a fault of ODC."""

_LONGEST = 200


def shorten(text: str, most: int = _LONGEST) -> str:
    """``text``, without its middle if it is longer than ``most`` characters."""
    if len(text) <= most:
        return text
    left = f" ...({len(text) - most:,} characters left out)... "
    return text[: most // 2] + left + text[-(most // 2) :]


class _Short(reprlib.Repr):
    """Does not build the whole text of a large value."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = self.maxlong = _LONGEST


def shown(value: object) -> str:
    """``repr(value)`` for an error message, of bounded length for any value."""
    try:
        return shorten(_Short().repr(value))
    except Exception:  # a repr of its own that fails, an int of more digits than Python prints
        return f"<{type(value).__name__}>"
