"""Trains BERT to classify texts with Transformers and Accelerate: the rival of `bench train`, as the article on Accelerate has it.

    train_end_to_end.py --make FOLDER --train_file TSV
    accelerate launch ... train_end_to_end.py --folder FOLDER --train_file TSV --validation_file TSV --batch_size N --padding KIND

The first makes a vocabulary of the training texts and a model with random weights, of the size that `nlp_example` trains. The second is
the whole job: it reads the texts, trains for one epoch by the schedule of `nlp_example`, judges all texts of the other file, and the
main process prints `report=` with its mean loss and the accuracy.
"""

import argparse
import csv
import json
import pathlib

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.optim import AdamW
from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast, get_linear_schedule_with_warmup

MAX_LENGTH = 128
LEARNING_RATE = 1e-3


def read(path):
    with open(path, encoding="utf-8", newline="") as file:
        rows = list(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    return [text for text, _ in rows], [int(label) for _, label in rows]


def make(folder, train_file):
    from tokenizers import BertWordPieceTokenizer

    folder.mkdir(parents=True, exist_ok=True)
    words = BertWordPieceTokenizer(lowercase=True)
    texts, labels = read(train_file)
    words.train_from_iterator(texts, vocab_size=8000)
    words.save_model(str(folder))
    BertTokenizerFast(vocab_file=str(folder / "vocab.txt"), do_lower_case=True).save_pretrained(folder)
    set_seed(42)
    config = BertConfig(
        vocab_size=words.get_vocab_size(),
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=512,
        max_position_embeddings=MAX_LENGTH,
        num_labels=len(set(labels)),
    )
    BertForSequenceClassification(config).save_pretrained(folder)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--make", type=pathlib.Path)
    parser.add_argument("--folder", type=pathlib.Path)
    parser.add_argument("--train_file", type=pathlib.Path, required=True)
    parser.add_argument("--validation_file", type=pathlib.Path)
    parser.add_argument("--batch_size", type=int)
    parser.add_argument("--padding", choices=["max_length", "longest"])
    arguments = parser.parse_args()
    if arguments.make:
        make(arguments.make, arguments.train_file)
        return

    accelerator = Accelerator()
    set_seed(42)
    torch.set_num_threads(1)
    tokenizer = BertTokenizerFast.from_pretrained(arguments.folder)
    model = BertForSequenceClassification.from_pretrained(arguments.folder)
    optimizer = AdamW(model.parameters(), lr=LEARNING_RATE)

    def rows(path):
        texts, labels = read(path)
        pad = arguments.padding == "max_length"
        tokens = tokenizer(texts, truncation=True, max_length=MAX_LENGTH, padding="max_length" if pad else False)
        return [dict({key: values[row] for key, values in tokens.items()}, labels=labels[row]) for row in range(len(texts))]

    def collate(batch):
        return tokenizer.pad(batch, padding="longest", return_tensors="pt")

    def loader(path, shuffle):
        return torch.utils.data.DataLoader(
            rows(path), batch_size=arguments.batch_size, shuffle=shuffle, collate_fn=collate
        )

    train_loader, validation_loader = loader(arguments.train_file, True), loader(arguments.validation_file, False)
    # The schedule counts the steps of all processes, as Accelerate has it.
    num_steps = len(train_loader)
    scheduler = get_linear_schedule_with_warmup(optimizer, num_steps // 10, num_steps)
    model, optimizer, train_loader, validation_loader, scheduler = accelerator.prepare(
        model, optimizer, train_loader, validation_loader, scheduler
    )
    model.train()
    losses = []
    for batch in train_loader:
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.eval()
    right = total = 0
    for batch in validation_loader:
        with torch.no_grad():
            predictions = model(**batch).logits.argmax(dim=-1)
        predictions, labels = accelerator.gather_for_metrics((predictions, batch["labels"]))
        right += (predictions == labels).sum().item()
        total += labels.numel()
    if accelerator.is_main_process:
        report = {"accuracy": right / total, "loss": sum(losses) / len(losses), "num_rows": total, "steps": len(losses)}
        print("report=" + json.dumps(report), flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
