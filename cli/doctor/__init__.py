"""``odc doctor`` says what this machine can do for ODC, and what to change where the machine cannot.

A check looks at facts (versions, limits, devices) and says what it found and what to do. Functions that judge are pure:
they see their arguments only. ``software.Facts`` collects each fact once, and without a CUDA context.
"""
