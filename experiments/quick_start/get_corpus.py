#!/usr/bin/env python3
"""Writes the quick start's text: Jane Austen's six novels (public domain, 4.0 MB) out of Debian's and Ubuntu's package
r-cran-janeaustenr. Five novels become train.txt, Northanger Abbey, held out, becomes validation.txt.

    get_corpus.py [--out DIR] [--deb FILE]

The package is read where it is installed; otherwise its archive (1.6 MB) is fetched by `apt-get download`, which needs
no privileges and does not pull in R, and unpacked into a temporary folder. Nothing but Python's standard library is
used. A folder that already holds the right text is left as it is.

The package's data file holds one record a novel: the unpacked size (4 bytes, big-endian), then a zlib stream of an R
serialisation, which is a character vector with one string a line ("R Internals", section 1.8).
"""

import argparse
import hashlib
import os
import pathlib
import struct
import subprocess
import sys
import tempfile
import zlib

PACKAGE = "r-cran-janeaustenr"
DATA_FILE = "usr/lib/R/site-library/janeaustenr/data/Rdata.rdb"
NOVELS = ["Emma", "Mansfield Park", "Northanger Abbey", "Persuasion", "Pride and Prejudice", "Sense and Sensibility"]
HELD_OUT = "Northanger Abbey"
# SHA-256 of what is written; the package's own files may differ in their compression.
SHA256 = {
    "train.txt": "65e5f6ff5f0ab5f040bd924b487bab847a4f30725c3dfa76b7bce520ef98e486",
    "validation.txt": "51f91bbe0517db8e65cff009b097ce0a1836124c4e0532ac19e6c0cad982abed",
}
R_CHARACTER_VECTOR = 16
R_STRING = 9


class CorpusError(Exception):
    pass


def lines_of(serialised: bytes) -> list[bytes]:
    """The strings of one serialised character vector: the header names the format (X: big-endian) and R's versions."""
    position = 0

    def integers(count: int) -> tuple[int, ...]:
        nonlocal position
        values = struct.unpack_from(f">{count}i", serialised, position)
        position += 4 * count
        return values

    if serialised[:2] != b"X\n":
        raise CorpusError("not an R serialisation in its big-endian form")
    position = 2
    version, _, _ = integers(3)
    if version == 3:  # names the native encoding
        (size,) = integers(1)
        position += size
    flags, count = integers(2)
    if flags & 0xFF != R_CHARACTER_VECTOR:
        raise CorpusError(f"R type {flags & 0xFF}, a character vector is {R_CHARACTER_VECTOR}")
    lines = []
    for _ in range(count):
        flags, size = integers(2)
        if flags & 0xFF != R_STRING or size < 0:
            raise CorpusError(f"R type {flags & 0xFF} of {size} bytes at byte {position}, wanted a string")
        lines.append(serialised[position : position + size])
        position += size
    return lines


def novels_of(data: bytes) -> dict[str, bytes]:
    novels = {}
    for name in NOVELS:
        stream = zlib.decompressobj()
        novels[name] = b"\n".join(lines_of(stream.decompress(data[4:]))) + b"\n"
        data = stream.unused_data
    return novels


def unpack(archive: pathlib.Path, folder: pathlib.Path) -> bytes:
    subprocess.run(["dpkg-deb", "-x", archive, folder], check=True)
    return (folder / DATA_FILE).read_bytes()


def package_data(archive: str | None) -> bytes:
    installed = pathlib.Path("/") / DATA_FILE
    if archive is None and installed.exists():
        return installed.read_bytes()
    with tempfile.TemporaryDirectory(prefix="austen-") as scratch:
        folder = pathlib.Path(scratch)
        if archive is not None:
            return unpack(pathlib.Path(archive), folder)
        # apt's own sandbox user cannot write here, which costs only a warning.
        fetched = subprocess.run(["apt-get", "download", "-q", PACKAGE], cwd=folder, capture_output=True, text=True)
        archives = sorted(folder.glob(f"{PACKAGE}_*.deb"))
        if fetched.returncode != 0 or not archives:
            raise CorpusError(f"apt-get download {PACKAGE}: {fetched.stderr.strip()}\n"
                              "Run `apt-get update` first, or fetch the package elsewhere and pass it with --deb.")
        return unpack(archives[0], folder)


def digest(path: pathlib.Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else ""


def write_atomically(path: pathlib.Path, text: bytes) -> None:
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_bytes(text)
        beside.rename(path)
    finally:
        beside.unlink(missing_ok=True)


def main() -> int:
    root = pathlib.Path(__file__).resolve().parents[2]
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", default=str(root / "data" / "austen"), help="folder to write (default: %(default)s)")
    parser.add_argument("--deb", help=f"an archive of {PACKAGE} that is already here")
    arguments = parser.parse_args()
    out = pathlib.Path(arguments.out)
    if all(digest(out / name) == want for name, want in SHA256.items()):
        print(f"corpus: {out} is complete")
        return 0
    try:
        novels = novels_of(package_data(arguments.deb))
        texts = {
            "train.txt": b"".join(text for name, text in novels.items() if name != HELD_OUT),
            "validation.txt": novels[HELD_OUT],
        }
        for name, text in texts.items():
            found = hashlib.sha256(text).hexdigest()
            if found != SHA256[name]:
                raise CorpusError(f"{name}: SHA-256 is {found}, wanted {SHA256[name]}: another edition of the package")
        out.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            write_atomically(out / name, text)
            print(f"corpus: {out / name}: {len(text):,} bytes")
    except (CorpusError, OSError, subprocess.CalledProcessError, zlib.error, struct.error) as error:
        print(f"corpus: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
