"""Layers whose parameters are tables on the servers."""

from fleet.nn.embedding import Embedding, EmbeddingBag

__all__ = ["Embedding", "EmbeddingBag"]
