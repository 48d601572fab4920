"""pytorch-widedeep's wide and deep parts on clicks."""

from __future__ import annotations

import torch
from clicks import clicks

# torchvision on PyPI is built for CUDA. Beside a torch without it, its import ends where it looks for these operators.
vision = torch.library.Library("torchvision", "DEF")
vision.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
vision.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

from pytorch_widedeep import Trainer  # noqa: E402
from pytorch_widedeep.metrics import Accuracy  # noqa: E402
from pytorch_widedeep.models import TabMlp, Wide, WideDeep  # noqa: E402
from pytorch_widedeep.preprocessing import TabPreprocessor, WidePreprocessor  # noqa: E402
from sklearn.metrics import log_loss, roc_auc_score  # noqa: E402

import fleet  # noqa: E402

torch.manual_seed(1)
data = clicks(6000)
train, test = data[:4800], data[4800:]
wide_cols = ["city"]
crossed_cols = [("user", "city")]
cat_embed_cols = [("user", 8), ("item", 8), ("city", 4)]

wide_preprocessor = WidePreprocessor(wide_cols=wide_cols, crossed_cols=crossed_cols)
tab_preprocessor = TabPreprocessor(cat_embed_cols=cat_embed_cols, continuous_cols=["age"])
X_wide, X_tab = wide_preprocessor.fit_transform(train), tab_preprocessor.fit_transform(train)
X_wide_test, X_tab_test = wide_preprocessor.transform(test), tab_preprocessor.transform(test)
target = train["click"].to_numpy()

wide = Wide(input_dim=X_wide.max(), pred_dim=1)
tab_mlp = TabMlp(
    column_idx=tab_preprocessor.column_idx,
    cat_embed_input=tab_preprocessor.cat_embed_input,
    continuous_cols=["age"],
    mlp_hidden_dims=[32, 16],
    mlp_dropout=0.0,
)
model = WideDeep(wide=wide, deeptabular=tab_mlp)
optimizer = fleet.join(torch.optim.Adam(model.parameters(), lr=0.01), model=model, remote="all")
trainer = Trainer(model, objective="binary", optimizers=optimizer, metrics=[Accuracy], verbose=0, num_workers=0)
options = {"n_epochs": 5, "batch_size": 256}
options["collate_fn"] = lambda rows: torch.utils.data.default_collate(rows[fleet.worker_index() :: fleet.worker_num()])
trainer.fit(X_wide=X_wide, X_tab=X_tab, target=target, **options)
predictions = trainer.predict_proba(X_wide=X_wide_test, X_tab=X_tab_test, batch_size=256)[:, 1]
print(f"test logloss: {log_loss(test['click'], predictions):.6f}, AUC: {roc_auc_score(test['click'], predictions):.6f}")
