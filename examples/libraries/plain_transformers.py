"""A small BERT on sequences, trained by the Hugging Face Trainer."""

from __future__ import annotations

import tempfile

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed

set_seed(1)
config = BertConfig(
    vocab_size=500,
    hidden_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=32,
    max_position_embeddings=16,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)
model = BertForSequenceClassification(config)
words = torch.randint(1, 500, (512, 12))
rows = [{"input_ids": sentence, "labels": (sentence < 100).sum() > 2} for sentence in words]
rows = [{**row, "labels": row["labels"].long()} for row in rows]

arguments = TrainingArguments(
    tempfile.mkdtemp(),
    num_train_epochs=2,
    per_device_train_batch_size=32,
    max_grad_norm=0.1,
    save_strategy="epoch",
    report_to="none",
    use_cpu=True,
    disable_tqdm=True,
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
trainer = Trainer(model, arguments, train_dataset=rows[:448], optimizers=(optimizer, None))
trainer.train()
predictions = trainer.predict(rows[448:]).predictions
print("test:", trainer.evaluate(rows[448:])["eval_loss"])
