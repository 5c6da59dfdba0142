"""The ``odc`` command. Only its entry points import this package."""

from odc.cli.app import main

__all__ = ["main"]
