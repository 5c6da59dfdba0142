"""A rank while it runs: what a runtime and an exchange of items have in common, how it waits, who looks after it."""
