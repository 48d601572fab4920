"""A factorization machine on clicks under Lightning's Trainer, which stops early and keeps the best checkpoint."""

from __future__ import annotations

import tempfile

import lightning.pytorch as pl
import torch
from clicks import SIZES, clicks
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from fleet.lightning import FleetStrategy

PARTS = slice(4200), slice(4200, 4800), slice(4800, None)


class Clicks(pl.LightningModule):
    """Scores a user, an item and a city by how well their vectors agree."""

    def __init__(self) -> None:
        super().__init__()
        self.vectors = torch.nn.ModuleList(torch.nn.Embedding(size, 8) for size in SIZES.values())
        self.biases = torch.nn.ModuleList(torch.nn.Embedding(size, 1) for size in SIZES.values())
        self.age = torch.nn.Linear(1, 1)

    def forward(self, ids, age):
        vectors = torch.stack([table(column) for table, column in zip(self.vectors, ids.T, strict=True)])
        agreement = (vectors.sum(0).square() - vectors.square().sum(0)).sum(1) / 2
        biases = sum(table(column) for table, column in zip(self.biases, ids.T, strict=True))
        return agreement * 0.1 + (biases + self.age(age)).squeeze(1)

    def training_step(self, batch, _):
        *inputs, click = batch
        return torch.nn.functional.binary_cross_entropy_with_logits(self(*inputs), click)

    def validation_step(self, batch, index):
        self.log("val_loss", self.training_step(batch, index), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.05)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


pl.seed_everything(1)
data = clicks(6000)
ids, age = torch.from_numpy(data[list(SIZES)].to_numpy()), torch.from_numpy(data[["age"]].to_numpy())
click = torch.from_numpy(data["click"].to_numpy())
train, val, test = (TensorDataset(ids[part], age[part], click[part]) for part in PARTS)

best = ModelCheckpoint(tempfile.mkdtemp(), monitor="val_loss")
callbacks = [best, EarlyStopping("val_loss", patience=2)]
options = {"logger": False, "enable_progress_bar": False}
trainer = pl.Trainer(strategy=FleetStrategy(remote="all"), max_epochs=12, callbacks=callbacks, **options)
samplers = [DistributedSampler(part, trainer.world_size, trainer.global_rank, shuffle=False) for part in (train, val)]
loaders = [DataLoader(sampler.dataset, 300 // trainer.world_size, sampler=sampler) for sampler in samplers]
trainer.fit(Clicks(), *loaders)

model = Clicks.load_from_checkpoint(best.best_model_path)
with torch.no_grad():
    predictions = torch.sigmoid(model(*test.tensors[:2]))
print(f"stopped after epoch {trainer.current_epoch}; best loss: {best.best_model_score:.6f}")
