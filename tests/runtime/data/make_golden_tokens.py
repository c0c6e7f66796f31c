#!/usr/bin/env python3
"""Writes golden_tokens.json: small tokenizers of every supported kind and the ids that the `tokenizers` package gives.

    pip install tokenizers
    make_golden_tokens.py > golden_tokens.json

The file has one tokenizer.json ("base", a vocabulary trained without any pre-tokenizer, so that its merges would run
across every border that a pre-tokenizer must set), and variants: top-level parts to replace in it, and cases of
[text in hexadecimal, ids]. Texts that are not UTF-8 were repaired by Python's errors="replace" first.
"""

import itertools
import json
import sys

import tokenizers
from tokenizers import models, pre_tokenizers, trainers

import compare_with_tokenizers as c


def base():
    trainer = trainers.BpeTrainer(vocab_size=900, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
                                  max_token_length=12)
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    texts = [t.decode() for t in c.seeds()]
    tokenizer.train_from_iterator([" ".join(texts[i:i + 3]) for i in range(len(texts))] * 2, trainer)
    return json.loads(tokenizer.to_str())


def main():
    made = base()
    vocab, merges = made["model"]["vocab"], [tuple(m) for m in made["model"]["merges"]]
    free = itertools.count(len(vocab))
    tokens = [{"id": vocab[content] if content in vocab else next(free), "content": content, "special": special, "single_word": single, "lstrip": left, "rstrip": right,
               "normalized": normalized}
              for content, special, single, left, right, normalized in [
                  ("<|endoftext|>", True, False, False, False, False), ("<|end|>", False, False, False, False, False),
                  ("<|end|>x", False, False, False, False, False), ("hello", False, True, False, False, False),
                  ("<l>", False, False, True, False, False), ("<r>", False, False, False, True, False),
                  ("<lr>", False, False, True, True, False), ("éé", False, False, False, False, True),
                  ("e\u0301e", False, False, False, False, True)]]
    nfc = {"type": "NFC"}
    variants = {
        "gpt2": {"pre_tokenizer": c.byte_level()},
        "llama3": {"pre_tokenizer": c.PRE_TOKENIZERS["llama-bpe"], "added_tokens": tokens},
        "qwen2": {"pre_tokenizer": c.PRE_TOKENIZERS["qwen2"], "normalizer": nfc, "added_tokens": tokens},
        "qwen35": {"pre_tokenizer": c.PRE_TOKENIZERS["qwen35"], "normalizer": {"type": "Sequence", "normalizers": [nfc]}},
        "smollm": {"pre_tokenizer": c.PRE_TOKENIZERS["smollm"]},
        "deepseek": {"pre_tokenizer": c.PRE_TOKENIZERS["deepseek-llm"]},
        "o200k": {"pre_tokenizer": c.sequence(c.split(c.O200K), c.byte_level(False))},
        "cl100k": {"pre_tokenizer": c.sequence(c.split(c.CL100K_POSSESSIVE), c.byte_level(False))},
        "prefix": {"pre_tokenizer": c.sequence(c.digits(False), c.byte_level(True, True)), "added_tokens": tokens},
        "removed": {"pre_tokenizer": c.sequence(c.split(r"\s+", "Removed"), c.byte_level(False))},
        "previous": {"pre_tokenizer": c.sequence(c.split(r"\w", "MergedWithPrevious"), c.byte_level(False))},
        "next": {"pre_tokenizer": c.sequence(c.split(" ", "MergedWithNext", kind="String"), c.byte_level(False))},
        "contiguous": {"pre_tokenizer": c.sequence(c.split(r"[\p{L}']", "Contiguous", True), c.byte_level(False))},
    }
    texts = c.seeds() + c.BROKEN + [b"", b"".join(c.BROKEN), b"  hello <l><lr> \n<r>  x<|end|>x<|end|> hello"]
    out = {"tokenizers": tokenizers.__version__, "base": c.document(vocab, merges, None), "variants": []}
    for name, parts in variants.items():
        oracle = tokenizers.Tokenizer.from_str(json.dumps({**out["base"], **parts}))
        cases = [[t.hex(), oracle.encode(t.decode(errors="replace"), add_special_tokens=False).ids] for t in texts]
        out["variants"].append({"name": name, "parts": parts, "cases": cases})
    # One case a line.
    print('{"tokenizers": %s,\n"base": %s,\n"variants": [' % (json.dumps(out["tokenizers"]), json.dumps(out["base"])))
    for i, variant in enumerate(out["variants"]):
        print('%s{"name": %s, "parts": %s, "cases": [' % ("," if i else "", json.dumps(variant["name"]), json.dumps(variant["parts"])))
        print(",\n".join(json.dumps(case, separators=(",", ":")) for case in variant["cases"]) + "]}")
    print("]}")


if __name__ == "__main__":
    sys.exit(main())
