"""How ranks meet: agreement through the process group's store, hosts."""
