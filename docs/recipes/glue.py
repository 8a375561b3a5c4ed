"""A transformer on pairs of sentences, with accelerate.

`backward=accelerator.backward` connects the two; accelerate's objects stay as they are. The model
computes its own loss. Accumulation steps and the division of the loss are gone.
"""

from pydoc_data.topics import topics

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics import MetricCollection
from torchmetrics.classification import BinaryAccuracy, BinaryF1Score
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup

from automicro import Microbatcher

DROPOUT = 0.1
MAX_GPU_BATCH_SIZE = 64
EVAL_BATCH_SIZE = 64


def pairs(rows, seed):
    """Two pieces of text, and whether the second continues the first."""
    generator = torch.Generator().manual_seed(seed)
    text = topics["class"] + topics["for"] + topics["operator-summary"]
    for _ in range(rows):
        length, start, other, label = torch.randint(1 << 20, (4,), generator=generator).tolist()
        length, start, label = 6 + length % 14, start % (len(text) - 40), label % 2
        second = start + length if label else other % (len(text) - 40)
        yield text[start : start + length], text[second : second + length], label


def collate(samples):
    rows = [
        torch.tensor([1, *(min(ord(c), 127) for c in a), 2, *(min(ord(c), 127) for c in b)])
        for a, b, _ in samples
    ]
    ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    labels = torch.tensor([label for _, _, label in samples])
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": labels}


def get_dataloaders(batch_size):
    train, evaluation = list(pairs(128, 0)), list(pairs(96, 1))
    return (
        DataLoader(train, batch_size, shuffle=True, collate_fn=collate),
        DataLoader(evaluation, EVAL_BATCH_SIZE, collate_fn=collate),
    )


def bert():
    config = BertConfig(
        vocab_size=128, hidden_size=48, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=96, max_position_embeddings=48, num_labels=2,
        hidden_dropout_prob=DROPOUT, attention_probs_dropout_prob=DROPOUT,
    )  # fmt: skip
    return BertForSequenceClassification(config)


def plain(epochs=2, batch_size=64):
    torch.manual_seed(42)
    accelerator = Accelerator(cpu=True)
    gradient_accumulation_steps = 1
    if batch_size > MAX_GPU_BATCH_SIZE:
        gradient_accumulation_steps = batch_size // MAX_GPU_BATCH_SIZE
        batch_size = MAX_GPU_BATCH_SIZE
    train_dataloader, eval_dataloader = get_dataloaders(batch_size)
    model = bert()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    lr_scheduler = get_linear_schedule_with_warmup(
        optimizer, 1, epochs * len(train_dataloader) // gradient_accumulation_steps
    )
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )
    metrics = MetricCollection([BinaryAccuracy(), BinaryF1Score()])
    history = []
    for _ in range(epochs):
        model.train()
        for step, batch in enumerate(train_dataloader):
            loss = model(**batch).loss
            loss = loss / gradient_accumulation_steps
            accelerator.backward(loss)
            history.append(loss.item())
            if (step + 1) % gradient_accumulation_steps == 0:
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
        model.eval()
        for batch in eval_dataloader:
            with torch.no_grad():
                outputs = model(**batch)
            predictions = outputs.logits.argmax(dim=-1)
            predictions, references = accelerator.gather_for_metrics((predictions, batch["labels"]))
            metrics.update(predictions, references)
        history += [metric.item() for metric in metrics.compute().values()]
        metrics.reset()
    return model, history


def microbatched(epochs=2, batch_size=64):
    torch.manual_seed(42)
    accelerator = Accelerator(cpu=True)
    train_dataloader, eval_dataloader = get_dataloaders(batch_size)
    model = bert()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    lr_scheduler = get_linear_schedule_with_warmup(optimizer, 1, epochs * len(train_dataloader))
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )
    microbatcher = Microbatcher(model, backward=accelerator.backward, optimizer=optimizer)
    metrics = MetricCollection([BinaryAccuracy(), BinaryF1Score()])
    history = []
    for _ in range(epochs):
        model.train()
        for batch in train_dataloader:
            loss = microbatcher.backward(batch).loss
            history.append(loss.item())
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
        model.eval()
        for batch in eval_dataloader:
            outputs = microbatcher.evaluate(batch, return_outputs=True).outputs
            predictions = outputs.logits.argmax(dim=-1)
            predictions, references = accelerator.gather_for_metrics((predictions, batch["labels"]))
            metrics.update(predictions, references)
        history += [metric.item() for metric in metrics.compute().values()]
        metrics.reset()
    return model, history


if __name__ == "__main__":
    print(*microbatched()[1], sep="\n")
