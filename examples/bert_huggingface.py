"""A small BERT learns to fill gaps in Python's own documentation, with HuggingFace's Trainer.

sdp run -n 2 examples/bert_huggingface.py                  prints the losses
sdp run -n 2 examples/bert_huggingface.py --backend gloo   the same losses, over gloo
sdp run -n 2 examples/bert_huggingface.py --compare        steps over gloo and smddp, in turns

Nothing is downloaded: the model is built from a configuration, the text is `pydoc_data.topics`.
"""

import argparse
import re
import tempfile
from collections import Counter
from pydoc_data.topics import topics

import torch
from transformers import BertConfig, BertForMaskedLM, Trainer, TrainerCallback, TrainingArguments

TOKENS = 64  # of a row
UNKNOWN, MASK, OTHERS = 0, 1, 2
NOT_ASKED = -100  # what the loss leaves out


def parsed() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--backend", default="smddp")
    parser.add_argument("--steps", type=int, default=60, help="to train, or of each turn")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256, help="of a layer; BERT-Mini has 256")
    parser.add_argument("--batch", type=int, default=4, help="rows of a rank in a step")
    parser.add_argument("--compare", action="store_true", help="gloo's steps with smddp's")
    return parser.parse_args()


def rows() -> tuple[list[torch.Tensor], int]:
    """The text in rows of tokens, and how many different tokens there are."""
    words = re.findall(r"\w+|[^\w\s]", "\n".join(topics[name] for name in sorted(topics)).lower())
    frequent = [word for word, count in Counter(words).most_common() if count > 1]
    number = {word: OTHERS + i for i, word in enumerate(frequent)}
    tokens = torch.tensor([number.get(word, UNKNOWN) for word in words])
    return list(tokens[: len(tokens) // TOKENS * TOKENS].view(-1, TOKENS)), OTHERS + len(number)


def gaps(batch: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """One token in seven is to be guessed, chosen anew each time."""
    tokens = torch.stack(batch)
    asked = torch.rand(tokens.shape) < 0.15
    asked[:, 0] = True
    labels = torch.where(asked, tokens, NOT_ASKED)
    return {"input_ids": torch.where(asked, MASK, tokens), "labels": labels}


def bert(layers: int, width: int, words: int) -> BertForMaskedLM:
    """The same weights every time."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=words,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=max(1, width // 64),
        max_position_embeddings=TOKENS,
    )
    return BertForMaskedLM(config)


def trained(options: argparse.Namespace, backend: str, *callbacks: TrainerCallback) -> Trainer:
    """A Trainer that has trained."""
    text, words = rows()
    arguments = TrainingArguments(
        output_dir=tempfile.gettempdir(),
        ddp_backend=backend,
        use_cpu=True,
        ddp_find_unused_parameters=False,  # else DDP looks for them in every step
        # BERT averages over its own tokens; by default Trainer expects that it does not.
        average_tokens_across_devices=False,
        per_device_train_batch_size=options.batch,
        max_steps=options.steps,
        learning_rate=3e-4,
        logging_steps=options.steps if options.compare else max(1, options.steps // 20),
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    model = bert(options.layers, options.width, words)
    trainer = Trainer(
        model, arguments, data_collator=gaps, train_dataset=text, callbacks=list(callbacks)
    )
    trainer.train()
    return trainer


if __name__ == "__main__":
    given = parsed()
    if given.compare:
        from alternating import compare

        compare(lambda backend, callback: trained(given, backend, callback))
    else:
        trained(given, given.backend)
