"""The ``odc`` command. Nothing imports this package but the entry points."""

from odc.cli.app import main

__all__ = ["main"]
