"""An unmodified script for HuggingFace's Trainer: a small BERT learns the help texts' language."""

import argparse
import os
from pydoc_data.topics import topics

import torch
from transformers import BertConfig, BertForMaskedLM, Trainer, TrainingArguments

parser = argparse.ArgumentParser()
parser.add_argument("--output_dir", default=os.environ["SM_MODEL_DIR"])
parser.add_argument("--max_steps", type=int, default=6)
arguments = parser.parse_args()

LENGTH = 32
text = " ".join(topics.values()).encode("ascii", "ignore")[: 64 * LENGTH]
rows = torch.tensor(list(text)).view(-1, LENGTH)
data = [{"input_ids": row, "labels": row} for row in rows]
config = BertConfig(
    vocab_size=128,
    hidden_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=64,
    max_position_embeddings=LENGTH,
)
torch.manual_seed(0)
trainer = Trainer(
    model=BertForMaskedLM(config),
    args=TrainingArguments(
        output_dir=arguments.output_dir,
        max_steps=arguments.max_steps,
        per_device_train_batch_size=4,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
    ),
    train_dataset=data,
)
loss = trainer.train().training_loss
backend = torch.distributed.get_backend()
print(f"ranks={trainer.args.world_size}; backend={backend}; train_loss={loss:.4f};", flush=True)
trainer.save_model()
