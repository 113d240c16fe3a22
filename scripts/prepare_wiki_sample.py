"""Make the tokenizer and cold-start demonstrations of configs/wiki_sample.yaml from its data.

    python scripts/prepare_wiki_sample.py --data DATA_FOLDER --output runs/wiki_sample/start

DATA_FOLDER holds corpus.jsonl.gz and train.jsonl with supporting_ids. No pretrained weights are needed:
the result lets a small random policy learn the protocol, not to answer real questions.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

VOCABULARY = 4096
MAX_DOCUMENTS = 3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()

    from calibadv_jax.core.errors import UserError
    from calibadv_jax.data.questions import load_questions
    from retriever.corpus.passages import load_corpus, split_contents
    from retriever.errors import RetrieverError

    try:
        corpus = load_corpus(arguments.data / "corpus.jsonl.gz")
        questions = load_questions(arguments.data / "train.jsonl")
    except (UserError, RetrieverError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    arguments.output.mkdir(parents=True, exist_ok=True)
    texts = [row["contents"] for row in corpus[:10_000]] + [question.text for question in questions]
    train_tokenizer(texts).save_pretrained(arguments.output / "tokenizer")
    rows = {row["id"]: row for row in corpus}
    with (arguments.output / "demonstrations.jsonl").open("w", encoding="utf-8") as file:
        for question in questions:
            supporting = [rows[name] for name in question.supporting_ids if name in rows][:MAX_DOCUMENTS]
            if not supporting:
                continue
            documents = []
            for row in supporting:
                title, text = split_contents(row["contents"])
                documents.append({"id": row["id"], "title": title, "text": text})
            answer = question.golden_answers[0]
            demonstration = {
                "id": question.id,
                "question": question.text,
                "golden_answers": list(question.golden_answers),
                "data_source": question.data_source,
                "turns": [
                    {
                        "text": f"<think> I search. </think>\n<search> {question.text} </search>",
                        "documents": documents,
                    },
                    {"text": f"<think> I have read it. </think>\n<answer> {answer} </answer>"},
                ],
            }
            file.write(json.dumps(demonstration, ensure_ascii=False) + "\n")
    sys.stdout.write(f"tokenizer and demonstrations written to {arguments.output}\n")
    return 0


def train_tokenizer(texts: list[str]) -> Any:
    """Train byte-level BPE in HuggingFace's format, with the protocol's tags as single tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    from calibadv_jax.contrib.worlds.words import EOS, PAD, TAGS

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(TAGS),
        special_tokens=[PAD, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(tag, normalized=False, special=False) for tag in TAGS])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS, pad_token=PAD)


if __name__ == "__main__":
    sys.exit(main())
