"""``torchrun ... -m odc.run script.py``: one rank of a script that is patched without an edit."""

from odc.launch.main import main

if __name__ == "__main__":
    main()
