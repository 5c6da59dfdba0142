"""Who waits for whom, who is dead, and how it ends: waits, watchdogs, helper threads, injected faults."""
