#!/usr/bin/env python3
"""Writes random token ids in llm.c's format, the data of the configurations here.

  make_tokens.py VOCABULARY [--tokens 4194304] [--dir data/random]      -> DIR/tokens_VOCABULARY.bin

The ids are uniform and the same on every call. A file that is there is left alone.
"""

import argparse
import array
import os
import random
import sys


def write_tokens(vocabulary, count, folder):
    path = os.path.join(folder, f"tokens_{vocabulary}.bin")
    if os.path.exists(path):
        return path
    os.makedirs(folder, exist_ok=True)
    narrow = vocabulary <= 1 << 16
    # 256 words of header: magic, version, number of ids.
    header = array.array("i", [20240520, 1, count] if narrow else [20240801, 7, count])
    header.extend([0] * (256 - len(header)))
    ids = array.array("H" if narrow else "I", random.Random(vocabulary).choices(range(vocabulary), k=count))
    if sys.byteorder == "big":
        header.byteswap()
        ids.byteswap()
    with open(path + ".part", "wb") as f:
        header.tofile(f)
        ids.tofile(f)
    os.replace(path + ".part", path)
    return path


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("vocabulary", type=int)
    parser.add_argument("--tokens", type=int, default=1 << 22)
    parser.add_argument("--dir", default=os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../data/random"))
    args = parser.parse_args()
    print(os.path.normpath(write_tokens(args.vocabulary, args.tokens, args.dir)))


if __name__ == "__main__":
    main()
