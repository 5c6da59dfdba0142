"""Late binding: ranks that have finished take samples that no rank has begun. (Needs torch.)

Cost estimates of a plan are off by some percent, and devices differ in speed. So a rank that has finished its queue
looks for a rank that will be late, and takes enough samples from the end of that queue to even both out. A rank that
will be late splits its last microbatches, so that samples are left to take. If a microbatch has a high fixed cost,
taken samples join the last microbatch of the rank that will finish first. If everything goes as planned, nothing is
taken or split.

The samples that a rank has not begun are a key in ``torch.distributed``'s store. A rank that begins or takes samples
updates the key by compare-and-set, so each sample runs exactly once. If a rank dies, its samples are missed at the end
of the minibatch, as without late binding.

Of ranks that compute together, one makes the choices and puts them into the store for the others.
"""
