"""Reads what click models are trained on: datasets of MultiSlot text, Parquet and CSV."""

from fleet.data.columns import Batch, Floats, Ids, Ignored, Ragged
from fleet.data.csv import Csv
from fleet.data.multislot import MultiSlot, write_multislot
from fleet.data.parquet import Parquet

__all__ = ["Batch", "Csv", "Floats", "Ids", "Ignored", "MultiSlot", "Parquet", "Ragged", "write_multislot"]
