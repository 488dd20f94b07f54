"""GraphSAGE: the vector of a node from its own embedding and the mean of its neighbours', layer by layer.

Neighbours are looked up in the tables as bags (`data.neighbours`), so all engines, homes and row optimizers train a
graph network as they train any other model. After Hamilton et al., NIPS 2017, arXiv 1706.02216, algorithm 1 with means:

    x_v' = act(W x_v + W_n mean {x_u : u in N(v)} + b)          without `act` in the last layer

Vectors are not scaled to unit length, as Marius's are not.

Legend: G subgraphs of a batch, n nodes of a layer, P bags of a layer, E width of the rows, D width of the vectors.
"""

import itertools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from jaxrec.embedding.lookup import sum_bags
from jaxrec.outcome import or_one
from jaxrec.types import Batch


def init_encoder(key: jax.Array, widths: Sequence[int]) -> list[dict[str, jax.Array]]:
    """Return the parameters of len(widths) - 1 layers, Glorot normal and zeros.

    Args:
      key: PRNG key.
      widths: of the rows, and of each layer's vectors.
    """
    normal = jax.nn.initializers.glorot_normal()
    layers = []
    for own, shape in zip(jax.random.split(key, len(widths) - 1), itertools.pairwise(widths), strict=True):
        of_self, of_neighbour = jax.random.split(own)
        layer = {"self": normal(of_self, shape), "neighbour": normal(of_neighbour, shape), "bias": jnp.zeros(shape[1])}
        layers.append(layer)
    return layers


def encode(layers: Sequence, activations: dict[str, jax.Array], batch: Batch) -> jax.Array:
    """Compute the vectors of a batch's targets.

    Args:
      layers: from `init_encoder`.
      activations: {'node': f32[G, n, E], 'neighbour': f32[G, P, E]}, the latter sums over bags.
      batch: Batch whose label has 'layers', from `data.neighbours.stacked`.

    Returns:
      f32[G, n, D], where the first nodes are the targets.
    """
    edges = batch.label["layers"]
    x, bags = activations["node"], activations["neighbour"]
    for number, (own, layer) in enumerate(zip(edges, layers, strict=True)):
        if number:
            x, bags = x[:, : own.degree.shape[1]], jax.vmap(_sums)(x, own.neighbour)
        total = jax.vmap(_by_node, (0, 0, None))(bags, own.node, own.degree.shape[1])
        mean = total / jnp.maximum(own.degree, 1)[..., None]
        x = x @ layer["self"] + mean @ layer["neighbour"] + layer["bias"][None, None]
        x = x if number == len(edges) - 1 else jax.nn.relu(x)
    return x


def _by_node(bags, node, nodes):
    return jax.ops.segment_sum(bags, node, nodes, indices_are_sorted=True)


def _sums(x, places):
    return sum_bags(x, jnp.where(places < 0, len(x), places))


def make_link_loss(decoder: Callable) -> Callable:
    """Make the loss of link prediction between encoded nodes.

    Args:
      decoder: loss of `models.link_prediction.make_loss`, which takes the vectors for embeddings.

    Returns:
      A loss for a `Task` over lookups 'node' and 'neighbour', the latter of 8 hots pooled by their sum: (params
      {'encoder', and those of the decoder}, activations, Batch of `SubgraphBatches`) -> f32[G].
    """

    def loss(params, activations, batch):
        vectors = encode(params["encoder"], activations, batch)
        label = batch.label

        def of_one(vectors, label):
            ids = {name: label[name] for name in ("head", "tail", "negative")}
            found = {name: vectors[places] for name, places in ids.items()}
            relation = label["relation"][:, None].astype(jnp.float32)
            each = decoder(params, found, Batch(ids, dense=relation, weight=label["weight"]))
            return jnp.sum(each * label["weight"]) / or_one(jnp.sum(label["weight"]))

        links = {name: leaf for name, leaf in label.items() if name != "layers"}
        each = [of_one(own, jax.tree.map(lambda leaf, g=g: leaf[g], links)) for g, own in enumerate(vectors)]
        return jnp.stack(each)

    return loss
