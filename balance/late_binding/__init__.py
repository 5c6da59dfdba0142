"""Late binding: samples that no rank has begun go to ranks that have nothing left. (Needs torch.)

A plan knows costs to some percent, and devices differ. So a rank that is through with its share looks who will be
late, and takes from the end of that one's share what evens them out. And a rank that will be late begins its last
microbatches in parts, so that there is something to take. Where a microbatch costs much by itself, what is taken joins
the last one of who will be through first. Where all goes as planned nothing is taken or split.

What a rank has yet to begin stands in a word of the store that ``torch.distributed`` was set up with. Whoever begins or
takes samples puts another word in its place if it is still the one that was read (compare and set), so each sample is
begun once. The samples of a rank that dies are missed at the end of the minibatch, as without late binding.

Of ranks that compute together, one begins and takes, and leaves each choice in the store for the others.
"""
