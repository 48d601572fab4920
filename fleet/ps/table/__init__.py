"""Sparse tables: where rows live (``store``) and what they mean (``table``)."""
