"""Datasets for what click models are trained on: MultiSlot text, Parquet and CSV."""

from fleet.data.columns import Batch, Floats, Ids, Ignored, Ragged
from fleet.data.multislot import MultiSlot, write_multislot

__all__ = ["Batch", "Floats", "Ids", "Ignored", "MultiSlot", "Ragged", "write_multislot"]
