"""The reference workload in idiomatic, fast PyTorch: the counterpart of jaxrec in sides.py.

Every variant is a function `TorchWork` -> step, where step(i, resident) trains on batch i and returns its loss, on the
device; batches are sent from pinned memory with the step, or are on the device if `resident`. All do the same work as
jaxrec: plain SGD on the dense part, duplicates reduced before a row optimizer with one accumulator per row, one id per
field or sum-pooled bags of ids.
"""

import dataclasses
import functools
import itertools
from typing import Any

import numpy as np
import torch
from torch import nn

DENSE_RATE, ROW_RATE, EPS = 0.01, 0.02, 1e-8


@dataclasses.dataclass(frozen=True)
class TorchWork:
    """Model and data of the workload, and its device."""

    cardinalities: tuple[int, ...]
    width: int
    batches: list
    model: str = "dlrm"
    device: str = "cpu"
    field_hots: tuple[int, ...] = ()
    """Ids per field; one if empty."""

    @property
    def hots(self) -> tuple[int, ...]:
        """Ids per field."""
        return self.field_hots or (1,) * len(self.cardinalities)

    @property
    def one_hot(self) -> bool:
        """Whether every field has one id."""
        return max(self.hots) == 1

    @property
    def bag_starts(self) -> torch.Tensor:
        """Start of each bag among the ids of a batch, example by example: i64[B F]."""
        return self._starts(np.tile(self.hots, len(self.batches[0].label)))

    @property
    def bag_ends_by_field(self) -> torch.Tensor:
        """Boundaries of the bags among the ids of a batch, field by field: i64[F B + 1]."""
        lengths = np.repeat(self.hots, len(self.batches[0].label))
        return self._starts(np.append(lengths, 0))

    def _starts(self, lengths):
        return torch.as_tensor(np.cumsum(lengths) - lengths, device=self.device)

    @property
    def rows(self) -> int:
        """Total rows of all tables."""
        return int(sum(self.cardinalities))

    @property
    def stacked_offsets(self) -> np.ndarray:
        """Offset in the stack of the table of each id of an example."""
        return np.repeat(np.concatenate([[0], np.cumsum(self.cardinalities)[:-1]]), self.hots)

    def by_field(self, ids: torch.Tensor) -> torch.Tensor:
        """Flatten ids [B, ids per example] field by field."""
        return torch.cat([part.reshape(-1) for part in ids.split(self.hots, dim=1)])

    def dense_part(self, compiled: bool = False) -> nn.Module:
        """The dense network on the device."""
        models: dict[str, Any] = {"dlrm": TorchDLRM, "dcnv2": TorchDCNv2, "dcnv2_mlperf": TorchMLPerf}
        of_model = models[self.model]
        module = of_model(len(self.cardinalities), self.width).to(self.device)
        return torch.compile(module) if compiled else module


class TorchDLRM(nn.Module):
    """Bottom MLP, dot interaction, top MLP: (dense [B, 13], vectors [B, F, E]) -> logit [B]."""

    pairs: torch.Tensor

    def __init__(self, fields: int, width: int):
        super().__init__()
        self.bottom = mlp([13, 512, 256, 64, width], last_relu=True)
        self.top = mlp([width + (fields + 1) * fields // 2, 512, 256, 1], last_relu=False)
        i, j = np.tril_indices(fields + 1, -1)
        self.register_buffer("pairs", torch.as_tensor(i * (fields + 1) + j))

    def forward(self, dense, vectors):
        x = self.bottom(dense)
        every = torch.cat([x[:, None], vectors], dim=1)
        products = torch.bmm(every, every.transpose(1, 2)).flatten(1)
        return self.top(torch.cat([x, products.index_select(1, self.pairs)], dim=1))[:, 0]


class TorchDCNv2(nn.Module):
    """Three full cross layers beside a tower 512-256: (dense [B, 13], vectors [B, F, E]) -> logit [B]."""

    def __init__(self, fields: int, width: int):
        super().__init__()
        size = 13 + fields * width
        self.cross = nn.ModuleList(nn.Linear(size, size) for _ in range(3))
        self.tower = mlp([size, 512, 256], last_relu=True)
        self.last = nn.Linear(size + 256, 1)

    def forward(self, dense, vectors):
        x0 = torch.cat([dense, vectors.flatten(1)], dim=1)
        crossed = x0
        for layer in self.cross:
            crossed = x0 * layer(crossed) + crossed
        return self.last(torch.cat([crossed, self.tower(x0)], dim=1))[:, 0]


class TorchMLPerf(nn.Module):
    """DLRM-DCNv2 of MLPerf Training: bottom MLP, three cross layers of rank 4 E, then a tower."""

    def __init__(self, fields: int, width: int):
        super().__init__()
        size, rank = (fields + 1) * width, 4 * width
        self.bottom = mlp([13, 512, 256, width], last_relu=True)
        self.low = nn.ModuleList(nn.Linear(size, rank, bias=False) for _ in range(3))
        self.high = nn.ModuleList(nn.Linear(rank, size) for _ in range(3))
        self.top = mlp([size, 1024, 1024, 512, 256, 1], last_relu=False)

    def forward(self, dense, vectors):
        x0 = torch.cat([self.bottom(dense), vectors.flatten(1)], dim=1)
        crossed = x0
        for low, high in zip(self.low, self.high, strict=True):
            crossed = x0 * high(low(crossed)) + crossed
        return self.top(crossed)[:, 0]


def mlp(sizes, last_relu):
    """Linear layers with ReLU between them, and after the last one if `last_relu`."""
    layers: list[nn.Module] = []
    for n, (a, b) in enumerate(itertools.pairwise(sizes)):
        layers.append(nn.Linear(a, b))
        if last_relu or n < len(sizes) - 2:
            layers.append(nn.ReLU())
    return nn.Sequential(*layers)


def rowwise_adagrad_(weight, accumulator):
    """Apply row-wise Adagrad to the rows of a sparse gradient; coalescing sums the duplicates."""
    gradient = weight.grad.coalesce()
    rows, values = gradient.indices()[0], gradient.values()
    accumulator.index_add_(0, rows, values.pow(2).mean(1))
    step = values / (accumulator[rows].sqrt() + EPS)[:, None]
    with torch.no_grad():
        weight.index_add_(0, rows, step, alpha=-ROW_RATE)
    weight.grad = None


def tensors(work: TorchWork, offsets, arrange=lambda ids: ids):
    """(dense, ids, label) of each batch; ids [B, ids per example], offset into the stack if given, then arranged."""
    found = [
        (
            torch.as_tensor(b.dense),
            arrange(torch.as_tensor(b.ids["sparse"].astype(np.int64) + offsets)),
            torch.as_tensor(b.label),
        )
        for b in work.batches
    ]
    return found if work.device == "cpu" else [tuple(t.pin_memory() for t in batch) for batch in found]


def make_step(work: TorchWork, dense_part, lookup, step_rows, data):
    """The training step around a lookup [B, F, E] and a row optimizer."""
    optimizer = torch.optim.SGD(dense_part.parameters(), lr=DENSE_RATE)
    loss_function = nn.BCEWithLogitsLoss()

    def to_device(batch):
        return [tensor.to(work.device, non_blocking=True) for tensor in batch]

    on_device = functools.cache(lambda index: to_device(data[index]))

    def step(index, resident=False):
        index %= len(data)
        dense, ids, label = on_device(index) if resident else to_device(data[index])
        loss = loss_function(dense_part(dense, lookup(ids)), label)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        step_rows()
        return loss.detach()

    return step


def stacked(work: TorchWork, compiled=False):
    """One EmbeddingBag for all fields."""
    fields = len(work.cardinalities)
    bag = nn.EmbeddingBag(work.rows, work.width, mode="sum", sparse=True, device=work.device)
    data, starts = tensors(work, work.stacked_offsets), work.bag_starts

    def lookup(ids):
        found = bag(ids.reshape(-1, 1)) if work.one_hot else bag(ids.reshape(-1), starts)
        return found.reshape(-1, fields, work.width)

    return make_step(work, work.dense_part(compiled), lookup, _row_step([bag.weight]), data)


def unique(work: TorchWork, compiled=False):
    """Duplicates reduced by torch.unique, the rows of the batch as a leaf, row-wise Adagrad in place."""
    fields, rows = len(work.cardinalities), work.rows
    weight = torch.randn(rows, work.width, device=work.device).mul_(rows**-0.5)
    accumulator = torch.zeros(rows, device=work.device)
    data, starts = tensors(work, work.stacked_offsets), work.bag_starts
    touched: list[torch.Tensor] = []

    def lookup(ids):
        found, inverse = torch.unique(ids.reshape(-1), return_inverse=True)
        leaf = weight.index_select(0, found).requires_grad_()
        touched[:] = found, leaf
        one = work.one_hot
        taken = leaf.index_select(0, inverse) if one else nn.functional.embedding_bag(inverse, leaf, starts, mode="sum")
        return taken.view(-1, fields, work.width)

    @torch.no_grad()
    def step_rows():
        found, leaf = touched
        assert leaf.grad is not None
        now = accumulator[found] + leaf.grad.square().mean(dim=1)
        accumulator[found] = now
        weight[found] = leaf - ROW_RATE * leaf.grad / (now.sqrt() + EPS)[:, None]

    return make_step(work, work.dense_part(compiled), lookup, step_rows, data)


def separate(work: TorchWork):
    """One EmbeddingBag per field, as in facebookresearch/dlrm."""
    bags = [nn.EmbeddingBag(n, work.width, mode="sum", sparse=True, device=work.device) for n in work.cardinalities]
    data, examples = tensors(work, 0, work.by_field), len(work.batches[0].label)
    sizes = [examples * hots for hots in work.hots]

    def lookup(ids):
        parts = [part.reshape(examples, -1) for part in ids.split(sizes)]
        return torch.stack([bag(part) for bag, part in zip(bags, parts, strict=True)], dim=1)

    return make_step(work, work.dense_part(), lookup, _row_step([bag.weight for bag in bags]), data)


def _row_step(weights):
    accumulators = [torch.zeros(len(weight), device=weight.device) for weight in weights]

    def step():
        for weight, accumulator in zip(weights, accumulators, strict=True):
            rowwise_adagrad_(weight, accumulator)

    return step


def fbgemm(work: TorchWork, memory: str = "", compiled: bool = False, **options):
    """FBGEMM's fused tables, EXACT_ROWWISE_ADAGRAD inside the backward pass.

    `memory` names one of its EmbeddingLocations, by default that of the device.
    """
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    place = (EmbeddingLocation.HOST, ComputeDevice.CPU)
    if work.device != "cpu":
        place = (EmbeddingLocation[memory or "DEVICE"], ComputeDevice.CUDA)
    tables = SplitTableBatchedEmbeddingBagsCodegen(
        [(n, work.width, *place) for n in work.cardinalities],
        optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        learning_rate=ROW_RATE,
        eps=EPS,
        **options,
    )
    data, bags = tensors(work, 0, work.by_field), work.bag_ends_by_field

    def lookup(ids):
        return tables(ids, bags).reshape(-1, len(work.cardinalities), work.width)

    return make_step(work, work.dense_part(compiled), lookup, lambda: None, data)


VARIANTS: dict[str, Any] = {
    "torch_unique": unique,
    "torch_stacked": stacked,
    "torch_separate": separate,
    "torch_compiled": functools.partial(stacked, compiled=True),
    "torch_unique_compiled": functools.partial(unique, compiled=True),
    "fbgemm": fbgemm,
}
# Under a GPU, tables in host memory: alone, and with a cache of a fifth of the rows.
HOST_MEMORY_VARIANTS: dict[str, Any] = {
    "fbgemm_uvm": functools.partial(fbgemm, memory="MANAGED", compiled=True, uvm_host_mapped=True),
    "fbgemm_uvm_cached": functools.partial(
        fbgemm, memory="MANAGED_CACHING", compiled=True, uvm_host_mapped=True, cache_load_factor=0.2
    ),
}
