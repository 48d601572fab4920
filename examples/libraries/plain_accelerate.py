"""A click model in a loop of Accelerate's, with its clipping and its accumulation of gradients."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from clicks import SIZES, clicks
from torch.utils.data import DataLoader, TensorDataset


class Clicks(torch.nn.Module):
    """Looks three ids up and predicts from them, by one hidden layer."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = torch.nn.ModuleList(torch.nn.Embedding(size, 8) for size in SIZES.values())
        self.layers = torch.nn.Sequential(torch.nn.Linear(24, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))

    def forward(self, ids):
        rows = [table(column) for table, column in zip(self.tables, ids.T, strict=True)]
        return self.layers(torch.cat(rows, 1)).squeeze(1)


torch.manual_seed(1)
data = clicks(6000)
ids, click = torch.from_numpy(data[list(SIZES)].to_numpy()), torch.from_numpy(data["click"].to_numpy())
loader = DataLoader(TensorDataset(ids[:4800], click[:4800]), batch_size=100, shuffle=True)

accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
model = Clicks()
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
for _ in range(4):
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            loss = torch.nn.functional.binary_cross_entropy_with_logits(model(inputs), targets)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

with torch.no_grad():
    predictions = torch.sigmoid(model(ids[4800:]))
print(f"test loss: {torch.nn.functional.binary_cross_entropy(predictions, click[4800:]):.6f}")
