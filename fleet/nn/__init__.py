"""Offers layers whose parameters are tables on the servers, and rules by which rows come to a table and leave it."""

from fleet.nn.embedding import Embedding, EmbeddingBag
from fleet.nn.embedding_group import EmbeddingGroup
from fleet.plan.life import CountFilter, MaxRows, Probability, SmallNorm, Unused

__all__ = [
    "CountFilter",
    "Embedding",
    "EmbeddingBag",
    "EmbeddingGroup",
    "MaxRows",
    "Probability",
    "SmallNorm",
    "Unused",
]
