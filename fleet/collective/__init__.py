"""Collective training on torch.distributed, the second backend behind the same two calls.

Its role makers exist (``fleet.role_maker``); the backend does not yet, and ``fleet.api`` refuses its jobs by name.
"""
