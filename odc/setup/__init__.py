"""How ranks meet: agreement through the process group's store, hosts, what every context object shares."""
