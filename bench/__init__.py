"""Benchmarks and committed results: ``odc bench``. Nothing but the command line imports this room."""

import sys

if sys.argv[:1] == ["-m"]:  # Python looks for the module of `python -m odc.bench.X`
    from odc.bench.harness.former import new_name

    _now = new_name(sys.orig_argv)
    if _now is not None:
        sys.exit(f"{sys.orig_argv[sys.orig_argv.index('-m') + 1]} is now: {_now} (odc bench list)")
