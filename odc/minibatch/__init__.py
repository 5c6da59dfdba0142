"""The minibatch protocol of one rank, where its gradients are summed, and the runtime that holds both."""
