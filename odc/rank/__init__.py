"""Parts that a runtime and an exchange of items share: context, waits, watchdogs."""
