"""A width per field: tables of other widths than the model's, whose rows are projected to it.

Legend: B batch, F columns, w width of a table, E embedding width of the model.
"""

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxrec.embedding import EmbeddingSpec

PROJECTION = "table_projection"  # among the variables of a job, beside 'params'; absent if all widths are E


def widths_of(given: Sequence[str], tables: Mapping[str, str]) -> dict[str, int]:
    """Return {table: width} of the words FIELD=WIDTH of --widths.

    Args:
      given: words.
      tables: {field: its table}.

    Raises:
      ValueError: a word of another form; no such field, one given twice, or one that shares the table of another.

    >>> widths_of(["user=32"], {"user": "user", "item": "item", "seen": "item"})
    {'user': 32}
    """
    found: dict[str, int] = {}
    for word in given:
        name, _, width = word.rpartition("=")
        table = tables.get(name)
        if not name or not (width.isascii() and width.isdecimal() and int(width)):
            raise ValueError(f"--widths {word} must be a field and its width, 1 or more: user=32, say.")
        if table is None:
            raise ValueError(f"--widths {word}: there is no field {name!r}; give one of {', '.join(tables)[:400]}.")
        if table != name:
            raise ValueError(f"--widths {word}: {name!r} shares the table of {table!r}: give {table}={width}.")
        if name in found:
            raise ValueError(f"--widths {word}: {name!r} is given twice, {found[name]} before: give one width.")
        found[name] = int(width)
    return found


def initial_projections(spec: EmbeddingSpec, width: int, seed: int) -> dict[str, dict[str, jax.Array]]:
    """Return {PROJECTION: {table: f32[w, E]}} of the tables of another width than E; nothing if there is none.

    They are uniform with variance 2 / (w + E), as in the reference code of DLRM (tricks/md_embedding_bag.py), and
    depend on the seed and the name of the table alone.
    """
    draw, key = nn.initializers.glorot_uniform(), jax.random.key(seed)
    own = {
        name: draw(jax.random.fold_in(key, zlib.crc32(name.encode())), (table.width, width))
        for name, table in spec.tables.items()
        if table.width != width
    }
    return {PROJECTION: own} if own else {}


def projected(spec: EmbeddingSpec, variables: Mapping[str, Any], activations: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return activations of one width: e P_i for each e of a table i of another width, and all others as they are.

    Reference: Ginart et al., "Mixed Dimension Embeddings with Application to Memory-Efficient Recommendation Systems",
    arXiv 1909.11810. There no table is wider than E: a wider one has more parameters, but a projection of rank E.

    Args:
      spec: tables and lookups.
      variables: with P_i, f32[w, E], as `initial_projections` adds them.
      activations: {lookup: f32[B, ..., w]}, or a list of f32[B, w] where columns differ in width.

    Returns:
      {lookup: f32[B, ..., E]}.
    """
    if PROJECTION not in variables:
        return activations
    kernels = variables[PROJECTION]
    wide = lambda table, found: found @ kernels[table] if table in kernels else found

    def of(tables, found):
        if isinstance(tables, str):
            return wide(tables, found)
        columns = found if isinstance(found, list) else jnp.unstack(found, axis=1)
        return jnp.stack([wide(*one) for one in zip(tables, columns, strict=True)], axis=1)

    return {name: of(spec.lookups[name].tables, found) for name, found in activations.items()}
