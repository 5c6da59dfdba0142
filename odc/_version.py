"""Name of the distribution, and the version. Imports nothing.

The import and the command are ``odc``, but the distribution has another name: ``odc`` on the package index is another
project.
"""

__version__ = "0.1.0"

DISTRIBUTION = "odc-fsdp"
"""The name in ``pyproject.toml``, which every hint to install something of this project must use."""


def install_command(extra: str) -> str:
    """What installs the packages of one of this project's extras, for people to type.

    Where the project is installed from a clone, pip takes the extras of what is installed.
    """
    return f"pip install '{DISTRIBUTION}[{extra}]'"
