"""FuxiCTR on clicks: a factorization machine beside layers, whose gradients the library clips to a norm of 10."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from clicks import SIZES, clicks
from fuxictr.features import FeatureMap
from fuxictr.pytorch.layers import FactorizationMachine, FeatureEmbedding, MLP_Block
from fuxictr.pytorch.models import BaseModel
from torch.utils.data import DataLoader

import fleet


class DeepFM(BaseModel):
    """The library's own, from its model zoo."""

    def __init__(self, feature_map, model_id="DeepFM", learning_rate=1e-3, embedding_dim=8, hidden_units=(), **kwargs):
        super().__init__(feature_map, model_id=model_id, **kwargs)
        self.embedding_layer = FeatureEmbedding(feature_map, embedding_dim)
        self.fm = FactorizationMachine(feature_map)
        self.mlp = MLP_Block(
            input_dim=feature_map.sum_emb_out_dim(),
            output_dim=1,
            hidden_units=list(hidden_units),
            hidden_activations="ReLU",
            output_activation=None,
        )
        self.compile(kwargs["optimizer"], kwargs["loss"], learning_rate)
        self.reset_parameters()
        self.model_to_device()

    def forward(self, inputs):
        """Predict from a batch."""
        x = self.get_inputs(inputs)
        feature_emb = self.embedding_layer(x)
        y_pred = self.fm(x, feature_emb)
        y_pred += self.mlp(feature_emb.flatten(start_dim=1))
        return {"y_pred": self.output_activation(y_pred)}


torch.manual_seed(2021)
data = clicks(6000)
folder = Path(tempfile.mkdtemp())
feature_map = FeatureMap("clicks", str(folder))
feature_map.default_emb_dim = 8
feature_map.labels = ["click"]
feature_map.features.update(age={"source": "", "type": "numeric"})
for name, size in SIZES.items():
    feature_map.features[name] = {"source": "", "type": "categorical", "vocab_size": size}
feature_map.num_fields = feature_map.get_num_fields()
(folder / "clicks").mkdir()

rows = data.to_dict("records")
train_gen = DataLoader(rows[:4200], batch_size=256, shuffle=True)
valid_gen = DataLoader(rows[4200:4800], batch_size=256)
test_gen = DataLoader(rows[4800:], batch_size=256)

model = DeepFM(
    feature_map,
    learning_rate=0.05,
    hidden_units=[32, 16],
    embedding_regularizer="l2(1.e-3)",
    optimizer="Adagrad",
    loss="binary_crossentropy",
    metrics=["AUC", "logloss"],
    model_root=str(folder),
    verbose=0,
)
model.optimizer = fleet.join(model.optimizer, model=model, remote="all")
train_gen.collate_fn = lambda rows: torch.utils.data.default_collate(rows[fleet.worker_index() :: fleet.worker_num()])
model.fit(train_gen, validation_data=valid_gen, epochs=4)
predictions = model.predict(test_gen)
print("test:", model.evaluate(test_gen))
