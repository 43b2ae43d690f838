"""Compute operations as whole numbers, for compiled loops: k is F of chunk k, -(k + 1) its B.

W of chunk k is SPLIT + k, its I is -SPLIT - (k + 1). Where stages have unequally many operations,
the shorter lists end in NOTHING.
"""

__all__ = ["NOTHING", "SPLIT"]

SPLIT = 2**40
NOTHING = 2**41
