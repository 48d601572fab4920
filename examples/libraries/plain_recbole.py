"""RecBole's BPR on MovieLens 100K, whose first ratings come with the wheel."""

from __future__ import annotations

import tempfile

from recbole.config import Config
from recbole.data import create_dataset, data_preparation
from recbole.model.general_recommender import BPR
from recbole.trainer import Trainer
from recbole.utils import init_seed

config = Config(
    model="BPR",
    dataset="ml-100k",
    config_dict={
        "use_gpu": False,
        "epochs": 3,
        "embedding_size": 16,
        "learner": "adagrad",
        "learning_rate": 0.1,
        "clip_grad_norm": {"max_norm": 5, "norm_type": 2},
        "checkpoint_dir": tempfile.mkdtemp(),
        "show_progress": False,
    },
)
init_seed(config["seed"], config["reproducibility"])
dataset = create_dataset(config)
train_data, valid_data, test_data = data_preparation(config, dataset)

model = BPR(config, train_data.dataset)
trainer = Trainer(config, model)
trainer.fit(train_data, valid_data)
result = trainer.evaluate(test_data, load_best_model=False)  # torch 2.6 and later do not read the file it writes
predictions = list(result.values())
print("test:", dict(result))
