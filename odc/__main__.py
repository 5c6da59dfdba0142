"""``python -m odc``."""

from odc.cli import main

if __name__ == "__main__":
    main()
