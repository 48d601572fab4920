"""torch-rechub's DeepFM on clicks, with a schedule, early stopping and a penalty on the embeddings."""

from __future__ import annotations

import tempfile

import torch
from clicks import SIZES, clicks
from torch_rechub.basic.features import DenseFeature, SparseFeature
from torch_rechub.models.ranking import DeepFM
from torch_rechub.trainers import CTRTrainer
from torch_rechub.utils.data import DataGenerator

import fleet

torch.manual_seed(2022)
data = clicks(6000)
x, y = data.drop(columns="click"), data["click"]
dense_feas = [DenseFeature("age")]
sparse_feas = [SparseFeature(name, vocab_size=size, embed_dim=8) for name, size in SIZES.items()]
dg = DataGenerator(x, y)
train_dl, val_dl, test_dl = dg.generate_dataloader(split_ratio=[0.7, 0.1], batch_size=256)

# No layers in between: each would come with a batch norm, which sees the part of a batch that one worker has.
model = DeepFM(deep_features=dense_feas + sparse_feas, fm_features=sparse_feas, mlp_params={"dims": [], "dropout": 0.0})
trainer = CTRTrainer(
    model,
    optimizer_fn=torch.optim.Adagrad,
    optimizer_params={"lr": 0.1},
    regularization_params={"embedding_l2": 1e-3},
    scheduler_fn=torch.optim.lr_scheduler.StepLR,
    scheduler_params={"step_size": 2, "gamma": 0.5},
    n_epoch=10,
    earlystop_patience=2,
    model_path=tempfile.mkdtemp(),
)
trainer.optimizer = fleet.join(trainer.optimizer, model=model, remote="all")
train_dl.collate_fn = lambda rows: torch.utils.data.default_collate(rows[fleet.worker_index() :: fleet.worker_num()])
trainer.fit(train_dl, val_dl)
predictions = trainer.predict(trainer.model, test_dl)
print(f"test AUC: {trainer.evaluate(trainer.model, test_dl):.6f}")
