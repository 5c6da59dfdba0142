"""How ranks end and how their death is detected: processes, helper threads, exit handlers, injected faults."""
