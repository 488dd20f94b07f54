"""The reference work in PyTorch, as fast as PyTorch users would write it: the other side of throughput.py.

Every variant is a function (cardinalities, width, batches) -> step, where step(i) trains on batch i and returns its
loss. All do the same work as jaxrec: plain SGD on the dense part, duplicates reduced before a row optimizer with one
accumulator a row (`adagrad`: one an element, torch.optim's own), one id a field.
"""

import itertools

import numpy as np
import torch
from torch import nn

DENSE_RATE, ROW_RATE, EPS = 0.01, 0.02, 1e-8


class Dense(nn.Module):
    """Bottom MLP, dot interaction, top MLP: (dense [B, 13], vectors [B, F, E]) -> logit [B]."""

    def __init__(self, fields: int, width: int):
        super().__init__()
        self.bottom = mlp([13, 512, 256, 64, width], last_relu=True)
        self.top = mlp([width + (fields + 1) * fields // 2, 512, 256, 1], last_relu=False)
        i, j = np.tril_indices(fields + 1, -1)
        self.pairs = torch.as_tensor(i * (fields + 1) + j)

    def forward(self, dense, vectors):
        x = self.bottom(dense)
        every = torch.cat([x[:, None], vectors], dim=1)
        products = torch.bmm(every, every.transpose(1, 2)).flatten(1)
        return self.top(torch.cat([x, products.index_select(1, self.pairs)], dim=1))[:, 0]


def mlp(sizes, last_relu):
    """Linear layers with ReLU between them, and behind the last one if asked."""
    layers: list[nn.Module] = []
    for n, (a, b) in enumerate(itertools.pairwise(sizes)):
        layers.append(nn.Linear(a, b))
        if last_relu or n < len(sizes) - 2:
            layers.append(nn.ReLU())
    return nn.Sequential(*layers)


def rowwise_adagrad_(weight, accumulator):
    """Steps the rows of a sparse gradient; coalescing sums the duplicates."""
    gradient = weight.grad.coalesce()
    rows, values = gradient.indices()[0], gradient.values()
    accumulator.index_add_(0, rows, values.pow(2).mean(1))
    step = values / (accumulator[rows].sqrt() + EPS)[:, None]
    with torch.no_grad():
        weight.index_add_(0, rows, step, alpha=-ROW_RATE)
    weight.grad = None


def tensors(batches, offsets):
    """(dense, ids, label) of each batch; ids [B, F] within the stack if offsets are given."""
    return [
        (
            torch.as_tensor(b.dense),
            torch.as_tensor(b.ids["sparse"].astype(np.int64) + offsets),
            torch.as_tensor(b.label),
        )
        for b in batches
    ]


def make_step(dense_part, lookup, step_rows, data):
    """The training step around a lookup [B, F, E] and a row optimizer."""
    optimizer = torch.optim.SGD(dense_part.parameters(), lr=DENSE_RATE)
    loss_function = nn.BCEWithLogitsLoss()

    def step(index):
        dense, ids, label = data[index % len(data)]
        loss = loss_function(dense_part(dense, lookup(ids)), label)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        step_rows()
        return float(loss.detach())

    return step


def stacked(cardinalities, width, batches, row_optimizer="rowwise", compiled=False):
    """One EmbeddingBag for all fields."""
    fields, rows = len(cardinalities), int(sum(cardinalities))
    bag = nn.EmbeddingBag(rows, width, mode="sum", sparse=True)
    dense_part = Dense(fields, width)
    part = torch.compile(dense_part) if compiled else dense_part
    data = tensors(batches, np.concatenate([[0], np.cumsum(cardinalities)[:-1]]))

    def lookup(ids):
        return bag(ids.reshape(-1, 1)).reshape(-1, fields, width)

    return make_step(part, lookup, _row_step([bag.weight], row_optimizer), data)


def unique(cardinalities, width, batches):
    """Duplicates reduced by hand: torch.unique, the batch's rows as a leaf, row-wise Adagrad in place."""
    fields, rows = len(cardinalities), int(sum(cardinalities))
    weight, accumulator = torch.randn(rows, width) * rows**-0.5, torch.zeros(rows)
    data = tensors(batches, np.concatenate([[0], np.cumsum(cardinalities)[:-1]]))
    touched: list[torch.Tensor] = []

    def lookup(ids):
        found, inverse = torch.unique(ids.reshape(-1), return_inverse=True)
        leaf = weight.index_select(0, found).requires_grad_()
        touched[:] = found, leaf
        return leaf.index_select(0, inverse).view(-1, fields, width)

    @torch.no_grad()
    def step_rows():
        found, leaf = touched
        assert leaf.grad is not None
        now = accumulator[found] + leaf.grad.square().mean(dim=1)
        accumulator[found] = now
        weight[found] = leaf - ROW_RATE * leaf.grad / (now.sqrt() + EPS)[:, None]

    return make_step(Dense(fields, width), lookup, step_rows, data)


def separate(cardinalities, width, batches):
    """One EmbeddingBag a field, as in facebookresearch/dlrm."""
    bags = [nn.EmbeddingBag(int(n), width, mode="sum", sparse=True) for n in cardinalities]
    data = [
        (dense, ids.T.contiguous(), label)
        for dense, ids, label in tensors(batches, np.zeros(len(cardinalities), np.int64))
    ]

    def lookup(ids):
        return torch.stack([bag(row[:, None]) for bag, row in zip(bags, ids, strict=True)], dim=1)

    return make_step(Dense(len(bags), width), lookup, _row_step([bag.weight for bag in bags], "rowwise"), data)


def _row_step(weights, kind):
    if kind == "adagrad":
        return _adagrad_step(torch.optim.Adagrad(weights, lr=ROW_RATE, eps=EPS))
    accumulators = [torch.zeros(len(weight)) for weight in weights]

    def step():
        for weight, accumulator in zip(weights, accumulators, strict=True):
            rowwise_adagrad_(weight, accumulator)

    return step


def _adagrad_step(optimizer):
    def step():
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def fbgemm(cardinalities, width, batches):
    """FBGEMM's fused tables, EXACT_ROWWISE_ADAGRAD inside the backward pass."""
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    fields = len(cardinalities)
    tables = SplitTableBatchedEmbeddingBagsCodegen(
        [(int(n), width, EmbeddingLocation.HOST, ComputeDevice.CPU) for n in cardinalities],
        optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        learning_rate=ROW_RATE,
        eps=EPS,
    )
    data = [
        (dense, ids.T.contiguous().reshape(-1), label)
        for dense, ids, label in tensors(batches, np.zeros(fields, np.int64))
    ]
    bags = torch.arange(len(data[0][1]) + 1)

    def lookup(ids):
        return tables(ids, bags).reshape(-1, fields, width)

    return make_step(Dense(fields, width), lookup, lambda: None, data)


def compiled(cardinalities, width, batches):
    """`stacked` with the dense part under torch.compile."""
    return stacked(cardinalities, width, batches, compiled=True)


def sparse_adagrad(cardinalities, width, batches):
    """`stacked` with torch.optim.Adagrad on the sparse gradient."""
    return stacked(cardinalities, width, batches, row_optimizer="adagrad")


VARIANTS = {
    "torch_unique": unique,
    "torch_stacked": stacked,
    "torch_separate": separate,
    "torch_sparse_adagrad": sparse_adagrad,
    "torch_compiled": compiled,
    "fbgemm": fbgemm,
}
