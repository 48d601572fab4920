"""Offers layers whose parameters are tables on the servers."""

from fleet.nn.embedding import Embedding, EmbeddingBag
from fleet.nn.embedding_group import EmbeddingGroup

__all__ = ["Embedding", "EmbeddingBag", "EmbeddingGroup"]
