"""DeepCTR-Torch's DeepFM on clicks, by compile and fit, with its penalty on the embeddings."""

from __future__ import annotations

import torch
from clicks import SIZES, clicks
from deepctr_torch.inputs import DenseFeat, SparseFeat, get_feature_names
from deepctr_torch.models import DeepFM
from sklearn.metrics import log_loss, roc_auc_score

data = clicks(6000)
columns = [SparseFeat(name, size, embedding_dim=8) for name, size in SIZES.items()] + [DenseFeat("age", 1)]
feature_names = get_feature_names(columns)
train, test = data[:4800], data[4800:]


def inputs(data):
    """The features by name, and what to predict of them."""
    return {name: data[name].to_numpy() for name in feature_names}, data["click"].to_numpy()


def mean_loss(prediction, label, reduction):  # noqa: ARG001
    """The library would add up the examples of a batch; a mean does not depend on how large a batch is."""
    return torch.nn.functional.binary_cross_entropy(prediction, label)


model = DeepFM(columns, columns, dnn_hidden_units=(32, 16), l2_reg_embedding=1e-3)
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
model.compile(optimizer, mean_loss, metrics=["binary_crossentropy"])
options = {"shuffle": False, "epochs": 4, "verbose": 2}
model.fit(*inputs(train), batch_size=256, **options)
predictions = model.predict(inputs(test)[0], batch_size=256)
print(f"test logloss: {log_loss(test['click'], predictions):.6f}, AUC: {roc_auc_score(test['click'], predictions):.6f}")
