"""How a rank ends and how its death is seen: processes, helper threads, what runs at exit, injected faults."""
