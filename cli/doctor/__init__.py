"""What this machine can do for ODC, and what to change where it cannot: ``odc doctor``.

A check looks at facts (versions, limits, devices) and says what it found and what to do. Those that judge are pure
functions of what they are given; ``software.Facts`` collects, once and without a CUDA context.
"""
