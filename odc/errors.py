"""Every error ODC raises on purpose. Bad input is a ``ValueError``; what goes wrong later is an :class:`OdcError`.

Imports nothing of ODC: every room quotes input in its messages with :func:`shown` and :func:`shorten`.
"""

from __future__ import annotations

import reprlib


class OdcError(RuntimeError):
    """Base of all run-time failures of ODC.

    Example:
        >>> session = odc.patch_fsdp(model)
        >>> session.close()
        >>> session.finish()
        Traceback (most recent call last):
            ...
        odc.errors.OdcError: this session is closed: ...
    """


class ConfigError(OdcError, ValueError):
    """An option or an environment variable has a value ODC cannot use.

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
    """The model uses an option that ODC does not support yet; the message names it.

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
    """An operation came at the wrong point of the minibatch (for example a push outside one).

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
    """An operation that cannot be at this point of the minibatch, refused before anything was changed. The session goes
    on, on this rank and on the others.

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
    """The process of a rank that is being waited for is gone.

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
    """A rank that is being waited for has closed its session.

    Example:
        >>> if rank == 1:  # session: of a patched model
        ...     session.close()
        >>> session.finish()
        Traceback (most recent call last):
            ...
        odc.errors.PeerClosedError: rank 0 waited ... for rank 1 ...
    """


class PeerSilentError(OdcError, TimeoutError):
    """A rank that is being waited for is alive but has made no progress for the whole timeout.

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
    """Another rank failed first; the message carries its rank and its error.

    Example:
        >>> if rank == 1:  # session: of a patched model
        ...     session.abort(RuntimeError("out of memory"))
        >>> session.finish()
        Traceback (most recent call last):
            ...
        odc.errors.AbortedError: ...out of memory...
    """


class FaultInjected(OdcError):
    """Raised by the fault hook ``do=raise``; never seen unless ``ODC_FAULT`` is set."""


OUR_FAULT = "This is a fault of ODC itself: please report it with the whole message"
"""Ends the message of a check that no script can make fail."""

_LONGEST = 200


def shorten(text: str, most: int = _LONGEST) -> str:
    """``text``, the middle left out where it is longer than ``most`` characters: input is quoted, not repeated."""
    if len(text) <= most:
        return text
    left = f" ...({len(text) - most:,} characters left out)... "
    return text[: most // 2] + left + text[-(most // 2) :]


class _Short(reprlib.Repr):
    """Does not build the whole text of what is large."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = self.maxlong = _LONGEST


def shown(value: object) -> str:
    """``repr(value)`` for an error message, of bounded length whatever the value is."""
    try:
        return shorten(_Short().repr(value))
    except Exception:  # a repr of its own that fails, an int of more digits than Python prints
        return f"<{type(value).__name__}>"
