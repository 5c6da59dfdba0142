"""The minibatch protocol of one rank, the sums of gradients, and the runtime that holds both."""
