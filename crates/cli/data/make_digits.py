#!/usr/bin/env python3
"""Makes digits.bin.zst from the digits that scikit-learn ships, and prints its checksums.

    python3 -m venv VENV && VENV/bin/pip install scikit-learn==1.9.1 zstandard==0.25.0
    VENV/bin/python crates/cli/data/make_digits.py

Layout before compression: 64 planes of 1,797 bytes, plane p holding pixel p (row-major, 0 to 16) of every image,
then a plane of 1,797 labels (0 to 9). Planes compress better than images, as one pixel's values are alike.
"""

import hashlib
import pathlib

import numpy
import zstandard
from sklearn.datasets import load_digits

IMAGES = 1797
PIXELS = 64
TARGET = pathlib.Path(__file__).with_name("digits.bin.zst")


def main() -> None:
    digits = load_digits()
    assert digits.data.shape == (IMAGES, PIXELS) and digits.target.shape == (IMAGES,)
    assert numpy.array_equal(digits.data, digits.data.astype(numpy.uint8)) and digits.data.max() == 16
    planes = digits.data.astype(numpy.uint8).T.tobytes() + digits.target.astype(numpy.uint8).tobytes()
    packed = zstandard.ZstdCompressor(level=19).compress(planes)
    TARGET.write_bytes(packed)
    print(f"{hashlib.sha256(planes).hexdigest()}  contents, {len(planes)} bytes (checked when the program loads it)")
    print(f"{hashlib.sha256(packed).hexdigest()}  {TARGET.name}, {len(packed)} bytes")


if __name__ == "__main__":
    main()
