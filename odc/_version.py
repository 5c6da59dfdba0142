"""The version, in one place that nothing else imports on its way."""

__version__ = "0.1.0"
