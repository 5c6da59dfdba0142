"""Set-up: agreement of ranks through the process group's store, and their hosts."""
