"""Named sets of text, cut into hashed blocks."""

from quantkit.calib_sets.text import NAMED, TokenBatch, TokenSlice, require_disjoint, text_slice

__all__ = ["NAMED", "TokenBatch", "TokenSlice", "require_disjoint", "text_slice"]
