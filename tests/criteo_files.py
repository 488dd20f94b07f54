"""Files in the format of Criteo, and what was prepared from them."""

import numpy as np

from jaxrec.data.criteo import open_split


def criteo_lines(rows, seed=0):
    """Well-formed lines with few categories and some empty fields."""
    draw, lines = np.random.default_rng(seed), []
    for _ in range(rows):
        dense = [str(x) if x else "" for x in draw.integers(-3, 50, 13)]
        category = [f"{x * 7919:08x}" if x else "" for x in draw.integers(0, 9, 26)]
        lines.append("\t".join([str(int(draw.random() < 0.3)), *dense, *category]))
    return lines


def write_lines(path, lines):
    path.write_text("\n".join(lines) + "\n")
    return path


def read_all(directory, name):
    """{column: all rows of a split}."""
    split = open_split(directory, name)
    blocks = [split[i] for i in range(len(split))]
    assert [len(b["label"]) for b in blocks] == split.rows
    return {key: np.concatenate([b[key] for b in blocks]) for key in blocks[0]}
