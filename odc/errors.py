"""Every error ODC raises on purpose. Bad input is a ``ValueError``; what goes wrong later is an :class:`OdcError`."""

from __future__ import annotations


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
