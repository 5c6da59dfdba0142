"""Every error ODC raises on purpose. Bad input is a ``ValueError``; what goes wrong later is an :class:`OdcError`.

Imports nothing of ODC: every room quotes input in its messages with :func:`shown` and :func:`shorten`.
"""

from __future__ import annotations

import reprlib


class OdcError(RuntimeError):
    """Base of all run-time failures of ODC."""


class ConfigError(OdcError, ValueError):
    """An option or an environment variable has a value ODC cannot use."""


class SetupError(OdcError):
    """The ranks could not agree or connect during set-up; nothing was patched."""


class UnsupportedError(OdcError, NotImplementedError):
    """The model uses an option that ODC does not support yet; the message names it."""


class ProtocolError(OdcError):
    """An operation came at the wrong point of the minibatch (for example a push outside one)."""


class MisuseError(ProtocolError):
    """An operation that cannot be at this point of the minibatch, refused before anything was changed. The session goes
    on, on this rank and on the others."""


class PeerDiedError(OdcError):
    """The process of a rank that is being waited for is gone."""


class PeerClosedError(OdcError):
    """A rank that is being waited for has closed its session."""


class PeerSilentError(OdcError, TimeoutError):
    """A rank that is being waited for is alive but has made no progress for the whole timeout."""


class AbortedError(OdcError):
    """Another rank failed first; the message carries its rank and its error."""


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
