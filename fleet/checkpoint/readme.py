"""Writes the page beside a saved model: what is in its directory, and how to use it with PyTorch alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from fleet.numeric.tensors import kind_of

if TYPE_CHECKING:
    from fleet.checkpoint.inference import TableFacts

#: Of a model with more tensors than this the page lists the first ones.
_LISTED = 100

_HEAD = """\
# A model to serve

Saved by `fleet.save_inference_model`. PyTorch alone runs it; the package that trained it is not needed.

| file | |
|---|---|
"""

_FILES = {
    "model.safetensors": "every tensor, by its name in `state_dict()`; nothing in it is code",
    "model.pt2": "the model as a `torch.export` program with all its tensors, for batches of any size",
    "inference.json": "what each table is, and size and crc32 of the files",
}

_PROGRAM = """
## Running the program

Run it only if you trust who made it: a program is code.

```python
import torch

model = torch.export.load("model.pt2").module()
```

`model(*inputs)` takes positional arguments like those of the example it was exported with.
"""

_TENSORS = """
## Reading the tensors

```python
from safetensors.torch import load_file

state = load_file("model.safetensors")
```
"""

_TABLES = """
A table has two tensors: its sorted ids, and a row for each of them. An id that is not there reads the table's mean
everywhere, and a padding id zeros where it says so:

```python
import json

import torch

with open("inference.json") as file:
    tables = json.load(file)["tables"]


def look_up(name, wanted):
    \"\"\"The rows of a tensor of int64 ids, for a table by the name of its weight.\"\"\"
    ids, rows, table = state[name.removesuffix("weight") + "ids"], state[name], tables[name]
    found = torch.full((*wanted.shape, table["embedding_dim"]), table["mean"], dtype=rows.dtype)
    if len(ids):
        place = torch.searchsorted(ids, wanted).clamp(max=len(ids) - 1)
        known = ids[place] == wanted
        found[known] = rows[place[known]]
    if table["zero_padding"] and table["padding_idx"] is not None:
        found[wanted == table["padding_idx"]] = 0
    return found
```
"""


def readme(values: Mapping[str, torch.Tensor], tables: Mapping[str, TableFacts], has_program: bool) -> str:
    files = [f"| `{name}` | {what} |\n" for name, what in _FILES.items() if has_program or name != "model.pt2"]
    parts = [_HEAD, *files, _PROGRAM if has_program else "", _TENSORS, _TABLES if tables else ""]
    listed = [f"| `{key}` | {kind_of(tensor)} |\n" for key, tensor in list(values.items())[:_LISTED]]
    more = f"\nand {len(values) - _LISTED} more.\n" if len(values) > _LISTED else ""
    return "".join([*parts, "\n## What there is\n\n| tensor | |\n|---|---|\n", *listed, more])
